"""The two ends of a tunnel to a private API, on loopback: a fake `aws`, and an API server with its own certificate."""

from __future__ import annotations

import base64
import datetime
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from loopback import Handler

#: Forwards localPortNumber to the API server whose port is in API_PORT, as session-manager-plugin does.
FAKE_AWS = """\
#!{python}
import json, os, signal, socket, sys, threading, time
from pathlib import Path
words = sys.argv[1:]
Path(os.environ["AWS_CALLS"]).open("a").write(json.dumps(words) + "\\n")
if "AWS_PIDS" in os.environ:
    Path(os.environ["AWS_PIDS"]).open("a").write(f"{{os.getpid()}}\\n")
calls = len(Path(os.environ["AWS_CALLS"]).read_text().splitlines())
if calls <= int(os.environ.get("AWS_NOT_READY", "0")):
    sys.exit("An error occurred (TargetNotConnected) when calling the StartSession operation: i-0 is not connected.")
if os.environ.get("AWS_DENIED"):
    time.sleep(0.1)
    sys.exit("An error occurred (AccessDeniedException) when calling the StartSession operation")
if os.environ.get("PLUGIN_IGNORES_TERM") and os.fork():
    signal.pause()  # `aws` waits for its child, the plugin
if os.environ.get("PLUGIN_IGNORES_TERM"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    """An API server that answers every GET with its version."""

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


def write_programs(folder: Path) -> Path:
    """Write a fake `aws` and a `session-manager-plugin` into a new folder, and return it."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in {"aws": FAKE_AWS.format(python=sys.executable), "session-manager-plugin": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return programs


@contextmanager
def serve_api(pem: Path) -> Iterator[int]:
    """Serve the API over TLS with the key and the certificate in a file, and yield the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    server.daemon_threads = True
    # The handshake is left to the thread of its connection: one that stalls would stop `accept`.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
