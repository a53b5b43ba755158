"""The tunnel to a private API: the command that opens it, its end, and its errors, with a fake `aws` on loopback."""

from __future__ import annotations

import base64
import datetime
import json
import ssl
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from loopback import Handler, free_port
from provider_mocks.recording import ROOT

from infra import tunnel
from infra.kube_api import KubeApi

HOST = "0123.gr7.us-west-2.eks.amazonaws.com"

#: Forwards localPortNumber to the API server whose port is in API_PORT, as session-manager-plugin does.
FAKE_AWS = """\
#!{python}
import json, os, socket, sys, threading
from pathlib import Path
words = sys.argv[1:]
Path(os.environ["AWS_CALLS"]).open("a").write(json.dumps(words) + "\\n")
calls = len(Path(os.environ["AWS_CALLS"]).read_text().splitlines())
if calls <= int(os.environ.get("AWS_NOT_READY", "0")):
    sys.exit("An error occurred (TargetNotConnected) when calling the StartSession operation: i-0 is not connected.")
if os.environ.get("AWS_DENIED"):
    sys.exit("An error occurred (AccessDeniedException) when calling the StartSession operation")
parameters = json.loads(words[words.index("--parameters") + 1])
server = socket.create_server(("127.0.0.1", int(parameters["localPortNumber"][0])))
def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    target.close()
while True:
    near, _ = server.accept()
    far = socket.create_connection(("127.0.0.1", int(os.environ["API_PORT"])))
    threading.Thread(target=copy, args=(near, far), daemon=True).start()
    threading.Thread(target=copy, args=(far, near), daemon=True).start()
"""


class ApiServer(Handler):
    def do_GET(self) -> None:
        self.reply(200, b'{"major": "1"}')


def certificate(folder: Path, host: str) -> tuple[Path, str]:
    """Write a key with its certificate for `host`; return the file and the certificate in base64."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cluster")])
    now = datetime.datetime(2026, 1, 1)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = built.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{host}.pem"
    path.write_bytes(private + pem)
    return path, base64.b64encode(pem).decode()


@pytest.fixture
def no_network() -> None:
    """Allow connections: these tests use loopback."""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tunnel.Tunnel]:
    """Yield the tunnel to an API server on loopback, through a fake `aws`."""
    pem, authority = certificate(tmp_path, HOST)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"aws": FAKE_AWS.format(python=sys.executable), "session-manager-plugin": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("AWS_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(tunnel, "PAUSE_SECONDS", 0.02)
    from http.server import ThreadingHTTPServer

    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("API_PORT", str(server.server_address[1]))
    port = free_port()
    parameters = json.dumps({"host": [HOST], "portNumber": ["443"], "localPortNumber": [str(port)]})
    command = ("aws", "ssm", "start-session", "--target", "i-0", "--parameters", parameters)
    guides = {"aws": "https://cli", "session-manager-plugin": "https://plugin"}
    yield tunnel.Tunnel(command, guides, "TargetNotConnected", port, HOST, authority)
    server.shutdown()
    server.server_close()


def kubeconfig(opened: tunnel.Tunnel) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": f"https://{HOST}", "certificate-authority-data": opened.authority}}
        ],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    return tunnel.redirect(json.dumps(document), opened.port)


def test_a_client_reaches_the_api_server_while_the_tunnel_is_held(opened: tunnel.Tunnel) -> None:
    api = KubeApi.from_text(kubeconfig(opened), "none")
    with tunnel.held(opened):
        assert api.get("/version") == {"major": "1"}, "its certificate names the endpoint, not 127.0.0.1"
    assert not opened.answers(), "the tunnel must end with the command that opened it"


def test_the_tunnel_ends_when_its_process_is_killed(opened: tunnel.Tunnel) -> None:
    import subprocess

    program = f"import sys, time; from infra import tunnel; t = tunnel.Tunnel.from_json({opened.to_json()!r}); "
    program += "s = tunnel.start(t); print('open', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "open\n"
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(200):
        if not opened.answers():
            return
        threading.Event().wait(0.05)
    pytest.fail("a killed program leaves its session running")


def test_a_second_process_uses_the_tunnel_that_is_open(opened: tunnel.Tunnel, tmp_path: Path) -> None:
    with tunnel.held(opened), tunnel.held(opened):
        pass
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_machine_that_is_starting_is_waited_for(opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_NOT_READY", "2")
    with tunnel.held(opened):
        assert opened.answers()


def test_a_machine_that_never_starts_is_reported(opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_NOT_READY", "1000")
    with pytest.raises(tunnel.TunnelError, match=r"did not open in time: .*Fix: run this until .*aws ssm"):
        tunnel.start(opened, seconds=0.2)


def test_a_refused_session_is_one_line(opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DENIED", "1")
    with pytest.raises(tunnel.TunnelError, match="AccessDeniedException") as error:
        tunnel.start(opened)
    assert "\n" not in str(error.value)


def test_a_missing_plugin_is_reported_before_a_session_starts(opened: tunnel.Tunnel, tmp_path: Path) -> None:
    (tmp_path / "programs" / "session-manager-plugin").unlink()
    with pytest.raises(tunnel.TunnelError, match=r"program session-manager-plugin. Fix: install it, https://plugin"):
        tunnel.start(opened)


def test_another_program_at_the_port_is_reported(opened: tunnel.Tunnel, tmp_path: Path) -> None:
    _, other = certificate(tmp_path, "other.example")
    with (
        tunnel.held(opened),
        pytest.raises(tunnel.TunnelError, match=rf"port {opened.port} .* is not the API server"),
    ):
        tunnel.start(replace(opened, authority=other))


def test_the_state_describes_the_tunnel(opened: tunnel.Tunnel) -> None:
    resources = [{"type": "a:b:C"}, {"type": "torchrec-cloud:aws:Bastion", "outputs": {"tunnel": opened.to_json()}}]
    assert tunnel.find(resources) == opened
    assert tunnel.find(resources[:1]) is None
