"""The tunnel to a private API: the command that opens it, its end, and its errors, with a fake `aws` on loopback."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import free_port
from provider_mocks.recording import ROOT
from tunnel_ends import certificate, serve_api, write_programs

from infra import tunnel
from infra.kube_api import KubeApi

HOST = "0123.gr7.us-west-2.eks.amazonaws.com"


@pytest.fixture
def no_network() -> None:
    """Allow connections: these tests use loopback."""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tunnel.Tunnel]:
    """Yield the tunnel to an API server on loopback, through a fake `aws`."""
    pem, authority = certificate(tmp_path, HOST)
    monkeypatch.setenv("PATH", str(write_programs(tmp_path)))
    monkeypatch.setenv("AWS_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(tunnel, "PAUSE_SECONDS", 0.02)
    port = free_port()
    parameters = json.dumps({"host": [HOST], "portNumber": ["443"], "localPortNumber": [str(port)]})
    command = ("aws", "ssm", "start-session", "--target", "i-0", "--parameters", parameters)
    guides = {"aws": "https://cli", "session-manager-plugin": "https://plugin"}
    with serve_api(pem) as api_port:
        monkeypatch.setenv("API_PORT", str(api_port))
        yield tunnel.Tunnel(command, guides, "TargetNotConnected", port, HOST, authority)


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
