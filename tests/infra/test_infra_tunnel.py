"""The tunnel to a private API: the command that opens it, its end, and its errors, with a fake `aws` on loopback."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loopback import free_port
from provider_mocks.recording import ROOT
from pulumi import automation
from tunnel_ends import certificate, serve_api, write_programs

from infra import tunnel
from infra.automation import LiveStack, OperationError
from infra.automation.display import Display
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


def test_the_plugin_ends_with_the_tunnel_even_if_it_ignores_the_first_signal(
    opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLUGIN_IGNORES_TERM", "1")
    with tunnel.held(opened):
        assert opened.answers()
    assert not opened.answers(), "`aws` ended at the first signal, and left its child behind"


def wait_for_sessions(folder: Path, number: int) -> None:
    """Wait until the fake `aws` has been started so often."""
    for _ in range(400):
        if len((folder / "calls").read_text().splitlines()) >= number:
            return
        threading.Event().wait(0.05)
    pytest.fail(f"session {number} was never started")


def wait_until_open(opened: tunnel.Tunnel) -> None:
    for _ in range(400):
        if opened.answers():
            return
        threading.Event().wait(0.05)
    pytest.fail("the tunnel stays closed")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGSTOP"])
def test_a_session_that_ends_or_stalls_is_opened_again(
    name: str, opened: tunnel.Tunnel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "KEEP_ALIVE_SECONDS", 0.5)
    monkeypatch.setattr(tunnel, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setenv("AWS_PIDS", str(tmp_path / "pids"))
    with tunnel.held(opened):
        os.kill(int((tmp_path / "pids").read_text().split()[0]), getattr(signal, name))
        wait_for_sessions(tmp_path, 2)
        wait_until_open(opened)
    assert not opened.answers(), "the second session must end with the tunnel, too"


def test_an_idle_tunnel_is_used(opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "KEEP_ALIVE_SECONDS", 0.1)
    used = threading.Semaphore(0)
    answers = tunnel.Tunnel.answers

    def count(this: tunnel.Tunnel) -> bool:
        used.release()
        return answers(this)

    monkeypatch.setattr(tunnel.Tunnel, "answers", count)
    with tunnel.held(opened):
        assert all(used.acquire(timeout=20) for _ in range(6)), "Session Manager ends an idle session"


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
    expected = r"did not open in time: .*i-0 is not connected\. Fix: run this until .*aws ssm"
    with pytest.raises(tunnel.TunnelError, match=expected):
        tunnel.start(opened, seconds=3.0)


def test_a_refused_session_is_one_line(opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DENIED", "1")
    with pytest.raises(tunnel.TunnelError, match="AccessDeniedException") as error:
        tunnel.start(opened)
    assert "\n" not in str(error.value)


def test_a_session_that_is_refused_during_a_pause_is_not_started_again(
    opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_DENIED", "1")
    monkeypatch.setattr(tunnel, "PAUSE_SECONDS", 1.0)
    with pytest.raises(tunnel.TunnelError, match="AccessDeniedException"):
        tunnel.start(opened, seconds=2.5)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_missing_plugin_is_reported_before_a_session_starts(opened: tunnel.Tunnel, tmp_path: Path) -> None:
    (tmp_path / "programs" / "session-manager-plugin").unlink()
    with pytest.raises(tunnel.TunnelError, match=r"program session-manager-plugin. Fix: install it, https://plugin"):
        tunnel.start(opened)


def test_another_program_at_the_port_is_reported(opened: tunnel.Tunnel, tmp_path: Path) -> None:
    _, other = certificate(tmp_path, "other.example")
    with (
        tunnel.held(opened),
        pytest.raises(tunnel.TunnelError, match=rf"port {opened.port} .* is not the API server .*another stack"),
    ):
        tunnel.start(replace(opened, authority=other))


def test_another_server_of_the_same_authority_is_reported(opened: tunnel.Tunnel) -> None:
    with tunnel.held(opened), pytest.raises(tunnel.TunnelError, match=r"is not the API server 4567\.gr7\."):
        tunnel.start(replace(opened, server_name="4567.gr7.us-west-2.eks.amazonaws.com"))


def test_stacks_and_projects_have_their_own_ports() -> None:
    stacks = [("torchrec-cloud", "dev"), ("torchrec-cloud", "aws-75"), ("other", "dev"), ("other", "aws-75")]
    assert len({tunnel.port_of(*names) for names in stacks}) == len(stacks)


MACHINE = {"custom": True, "type": "aws:ec2/instance:Instance", "id": "i-0", "urn": "urn:pulumi:a::p::t::machine"}
OBJECT = {"custom": True, "type": "kubernetes:core/v1:Namespace", "id": "training", "urn": "urn:pulumi:a::p::t::o"}


def component(opened: tunnel.Tunnel) -> dict[str, Any]:
    return {"type": "torchrec-cloud:aws:Bastion", "outputs": {"tunnel": opened.to_json()}}


def test_the_state_describes_the_tunnel(opened: tunnel.Tunnel) -> None:
    assert tunnel.find([{"type": "a:b:C"}, component(opened), MACHINE]) == opened
    assert tunnel.find([{"type": "a:b:C"}]) is None


def test_a_machine_that_is_not_in_the_state_has_no_tunnel(opened: tunnel.Tunnel) -> None:
    assert tunnel.find([component(opened), {**MACHINE, "id": "i-1"}]) is None


class FakeStack:
    """A stack whose state is `resources`; it records its operations."""

    name = "aws"

    def __init__(self, resources: list[dict[str, Any]]) -> None:
        self._resources, self.done = resources, list[str]()

    def export_stack(self) -> SimpleNamespace:
        return SimpleNamespace(deployment={"resources": self._resources})

    def outputs(self) -> dict[str, Any]:
        return {}

    def preview(self, **_: object) -> None:
        self.done.append("preview")

    def up(self, **_: object) -> None:
        self.done.append("up")

    def refresh(self, **_: object) -> None:
        self.done.append("refresh")

    def destroy(self, **_: object) -> None:
        self.done.append("destroy")


def open_stack(resources: list[dict[str, Any]], folder: Path, shown: io.StringIO, patch: pytest.MonkeyPatch) -> Any:
    """Return the live stack and the fake one behind it."""
    (folder / "Pulumi.yaml").write_text("name: small\nruntime: python\n")
    (folder / "programs" / "pulumi").write_text("#!/bin/sh\necho v3.263.0\n")
    (folder / "programs" / "pulumi").chmod(0o755)
    stack = FakeStack(resources)
    patch.setattr(automation.Stack, "select", lambda *_: stack)
    return LiveStack("aws", folder=folder, display=Display(shown)), stack


def run(verb: str, resources: list[dict[str, Any]], folder: Path, patch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """Run a verb on a state; return the engine's operations and what the user saw."""
    shown = io.StringIO()
    live, stack = open_stack(resources, folder, shown, patch)
    getattr(live, verb)()
    return stack.done, shown.getvalue()


@pytest.mark.parametrize("verb", ["preview", "refresh", "destroy"])
def test_a_machine_that_is_gone_does_not_block_the_stack(
    verb: str, opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_NOT_READY", "1000")
    monkeypatch.setattr(tunnel, "REOPEN_SECONDS", 3.0)
    done, shown = run(verb, [component(opened), MACHINE, OBJECT], tmp_path, monkeypatch)
    assert done == [verb]
    [line] = [line for line in shown.splitlines() if line.startswith("warning: ")]
    assert "i-0 is not connected" in line
    assert f"python -m infra up --stack aws --replace '{MACHINE['urn']}'" in line


def test_a_machine_that_is_being_replaced_is_not_waited_for(
    opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live, stack = open_stack([component(opened), MACHINE, OBJECT], tmp_path, io.StringIO(), monkeypatch)
    with pytest.raises(OperationError, match="has no outputs"):
        live.up(replace=[MACHINE["urn"]])
    assert stack.done == ["up"]
    assert not (tmp_path / "calls").exists(), "the program opens the tunnel through the new machine"


@pytest.mark.parametrize("remaining", [[], [MACHINE], [OBJECT]], ids=["none", "machine", "object"])
def test_no_tunnel_opens_without_both_its_machine_and_an_object_in_the_cluster(
    remaining: list[dict[str, Any]], opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("destroy", [component(opened), *remaining], tmp_path, monkeypatch)[0] == ["destroy"]
    assert not (tmp_path / "calls").exists()


def test_the_tunnel_is_open_while_the_engine_runs(
    opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeStack, "destroy", lambda stack, **_: stack.done.append(str(opened.answers())))
    assert run("destroy", [component(opened), MACHINE, OBJECT], tmp_path, monkeypatch)[0] == ["True"]


def test_a_missing_plugin_stops_destroy_before_it_starts(
    opened: tunnel.Tunnel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "programs" / "session-manager-plugin").unlink()
    with pytest.raises(OperationError, match="Fix: install it, https://plugin"):
        run("destroy", [component(opened), MACHINE, OBJECT], tmp_path, monkeypatch)
