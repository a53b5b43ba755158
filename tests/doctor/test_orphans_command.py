"""`python -m infra orphans`: output, JSON, exit codes, missing permissions, progress and the end of `destroy`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra import __main__ as program
from infra import clouds, stack_files
from infra.automation.errors import OperationError
from infra.clouds.aws.doctor.causes import CREDENTIALS, DENIED
from infra.findings.common_causes import NO_CLIENT
from infra.findings.model import Check, QueryFailedError, ok
from infra.findings.orphans import Leftover, Search, shell
from infra.orphans import command

CARD = Leftover("network interface", "eni-1", "aws ec2 delete-network-interface --network-interface-id eni-1")
DISK = Leftover("volume", "vol-1", "aws ec2 delete-volume --volume-id vol-1", "2026-11-01T10:00Z", 0.011)
BUCKET = Leftover("bucket", "b", "aws s3 rb s3://b", kept="storage.on_destroy is keep")
Found = Callable[[], Sequence[Leftover]]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, pulumi: Callable[..., Path]) -> Callable[..., None]:
    """Return a function that sets what a cloud's searches find, and the resources in the state."""

    def put(
        *queries: tuple[str, Found],
        resources: Sequence[Any] = (),
        account: Callable[[], Any] = lambda: ok("acct 1"),
        **state: Any,
    ) -> None:
        searches = [Search(kind, query, finds_clusters=kind == "cluster") for kind, query in queries]
        orphans = SimpleNamespace(CLUSTER="aws:eks/cluster:Cluster", searches=lambda context: searches)
        doctor = SimpleNamespace(checks=lambda context: [Check("credentials", account)])
        monkeypatch.setattr(clouds.Cloud, "orphans", property(lambda _: orphans))
        monkeypatch.setattr(clouds.Cloud, "doctor", property(lambda _: doctor))
        pulumi(state.pop("outputs", {}), resources=resources, **state)

    return put


def denied() -> Sequence[Leftover]:
    """Raise the error of a missing permission."""
    raise QueryFailedError(DENIED, "AccessDenied: not authorized to perform: ec2:DescribeVolumes")


def test_orphans_are_listed_with_their_commands_and_the_exit_code_is_1(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("network interface", lambda: [CARD]), ("volume", lambda: [DISK]), ("bucket", lambda: [BUCKET]))
    assert program.main(["orphans", "--stack", "aws"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KIND", "ID", "SINCE", "USD/H", "REMOVE", "IT"]
    assert lines[1].split(maxsplit=4) == ["network", "interface", "eni-1", "-", f"-       {CARD.remove}"]
    assert "2026-11-01T10:00Z  0.0110  aws ec2 delete-volume --volume-id vol-1" in lines[2]
    assert "storage.on_destroy is keep" in "\n".join(lines)
    assert lines[-1].startswith("stack aws: 2 orphans, at least 0.01 USD/h: run the commands from top to bottom")


def test_nothing_left_is_exit_code_0_and_says_where_it_looked(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("volume", lambda: []), ("bucket", lambda: [BUCKET]))
    assert program.main(["orphans", "--stack", "aws"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("stack aws: nothing is left (2 kinds of resources searched, acct 1)\n")


CLUSTER = Leftover("cluster", "c", "aws eks delete-cluster --name c", live="cluster")
LIVE_BUCKET = dataclasses.replace(BUCKET, live="bucket")
KNOWN = {"urn": "urn:pulumi:aws::p::t::c", "custom": True, "type": "aws:eks/cluster:Cluster", "id": "known"}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (CLUSTER, {"outputs": None}),
        (LIVE_BUCKET, {"outputs": None}),
        (LIVE_BUCKET, {"last_update": None}),
        (CLUSTER, {"last_update": None}),
        (CLUSTER, {}),
        (CLUSTER, {"resources": [KNOWN]}),
    ],
    ids=["no stack", "no stack, bucket", "never up, bucket", "never up", "destroyed", "another cluster"],
)
def test_no_command_deletes_what_another_state_may_own(
    found: Leftover, state: dict[str, Any], cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("cluster", lambda: [found]), ("network interface", lambda: [CARD]), **state)
    assert program.main(["orphans", "--stack", "aws"]) == 1
    output = capsys.readouterr().out
    assert found.remove not in output
    assert CARD.remove not in output
    assert "eni-1" in output
    (line,) = (line for line in output.splitlines() if line.startswith("no commands: "))
    assert "another state backend than s3://states. Fix: compare `pulumi whoami -v` and PULUMI_BACKEND_URL" in line
    assert "delete nothing until the owner is known" in output
    assert program.main(["orphans", "--stack", "aws", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {item["remove"] for item in (*report["orphans"], *report["kept"])} == {""}
    assert report["withheld"] == [line]


def test_the_user_can_confirm_that_no_other_state_has_the_stack(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("cluster", lambda: [CLUSTER]), last_update=None)
    assert program.main(["orphans", "--stack", "aws", "--only-state"]) == 1
    assert CLUSTER.remove in capsys.readouterr().out


def test_no_command_is_printed_if_clusters_cannot_be_listed(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("cluster", denied), ("network interface", lambda: [CARD]))
    assert program.main(["orphans", "--stack", "aws"]) == 1
    output = capsys.readouterr().out
    assert CARD.remove not in output
    assert "it is unknown whether a cluster exists (cluster not checked)" in output


def test_commands_are_printed_after_a_destroy_that_kept_the_bucket(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("network interface", lambda: [CARD]), ("bucket", lambda: [LIVE_BUCKET]))
    assert program.main(["orphans", "--stack", "aws"]) == 1
    assert CARD.remove in capsys.readouterr().out


@pytest.mark.parametrize("how", ["pending", "locked", "changed"])
def test_no_command_is_printed_during_an_update(
    how: str, cloud: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state: dict[str, Any] = {"backend": f"file://{tmp_path}"}
    if how == "pending":
        state["pending"] = [{"resource": KNOWN, "type": "creating"}]
    if how == "locked":
        folder = tmp_path / ".pulumi/locks/organization/torchrec-cloud/aws"
        folder.mkdir(parents=True)
        (folder / "0.json").write_text("{}")

    def find() -> Sequence[Leftover]:
        if how == "changed":
            (tmp_path / "bin/state.json").write_text(json.dumps({"version": 3, "deployment": {"resources": [KNOWN]}}))
        return [CARD]

    cloud(("network interface", find), **state)
    assert program.main(["orphans", "--stack", "aws", "--only-state"]) == 1
    output = capsys.readouterr().out
    assert CARD.remove not in output
    assert "no commands: an update of stack aws is running or was interrupted" in output


def test_a_name_cannot_add_a_command() -> None:
    assert shell("aws s3 rb {uri}", uri="s3://a; rm -rf ~") == "aws s3 rb 's3://a; rm -rf ~'"


def test_what_the_state_knows_is_not_listed(cloud: Callable[..., None]) -> None:
    state = [{"urn": "urn:pulumi:aws::p::t::v", "custom": True, "type": "aws:ebs/volume:Volume", "id": "vol-1"}]
    cloud(("volume", lambda: [DISK]), resources=state)
    assert program.main(["orphans", "--stack", "aws"]) == 0


def test_a_missing_permission_is_one_line_for_all_its_kinds_and_exit_code_2(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("volume", denied), ("snapshot", denied), ("bucket", lambda: []))
    assert program.main(["orphans", "--stack", "aws"]) == 2
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("not checked: volume, snapshot: AccessDenied: not authorized to perform: ec2:Describe")
    assert "Fix: request the action" in line
    assert last.startswith("stack aws: nothing found, but not all was checked")


def test_an_orphan_counts_more_than_a_kind_that_could_not_be_listed(cloud: Callable[..., None]) -> None:
    cloud(("volume", denied), ("network interface", lambda: [CARD]))
    assert program.main(["orphans", "--stack", "aws"]) == 1


def test_credentials_of_another_account_search_nothing(
    cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def expired() -> Any:
        raise QueryFailedError(CREDENTIALS, "ExpiredToken", is_problem=True, login="aws sso login")

    cloud(("volume", lambda: [DISK]), account=expired)
    assert program.main(["orphans", "--stack", "aws"]) == 2
    output = capsys.readouterr().out
    assert output.startswith("not checked: credentials: ExpiredToken. Fix: aws sso login")
    assert "vol-1" not in output


def test_json_has_every_field(cloud: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    cloud(("volume", lambda: [DISK]), ("snapshot", denied), ("bucket", lambda: [BUCKET]))
    assert program.main(["orphans", "--stack", "aws", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["orphans"] == [
        {
            "kind": "volume",
            "id": "vol-1",
            "remove": DISK.remove,
            "since": DISK.since,
            "usd_per_hour": 0.011,
            "kept": "",
            "withheld": "",
        }
    ]
    assert [item["id"] for item in report["kept"]] == ["b"]
    assert [item["kind"] for item in report["not_checked"]] == ["snapshot"]
    assert report["exit_code"] == 1


def test_a_stack_without_a_file_is_the_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["orphans", "--stack", "nope"]) == 2
    assert "no file Pulumi.nope.yaml" in capsys.readouterr().err


def test_a_cluster_that_this_project_did_not_create_has_no_orphans(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["orphans", "--stack", "local"]) == 0
    assert "nothing is left" in capsys.readouterr().out


def test_kinds_are_searched_in_parallel(cloud: Callable[..., None]) -> None:
    barrier = threading.Barrier(3, timeout=20)

    def wait() -> Sequence[Leftover]:
        barrier.wait()
        return []

    cloud(("volume", wait), ("snapshot", wait), ("bucket", wait))
    assert program.main(["orphans", "--stack", "aws"]) == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OperationError("the state cannot be read"), "deleted; not searched for leftovers: the state cannot be read"),
        (KeyboardInterrupt(), "deleted; the search for leftovers was cancelled"),
    ],
    ids=["state", "Ctrl-C"],
)
def test_a_failed_search_does_not_fail_destroy(
    error: BaseException, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(command, "search", fail)
    command.after_destroy(argparse.Namespace(stack="aws", cwd=Path()))
    assert capsys.readouterr().err == f"stack aws: {expected}. Fix: python -m infra orphans --stack aws\n"


def test_destroy_ends_with_what_is_left(
    cloud: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infra.automation import command as engine

    def missing() -> Sequence[Leftover]:
        raise QueryFailedError(NO_CLIENT, "the Python package boto3 is missing")

    cloud(("network interface", lambda: [CARD]), ("volume", missing))
    monkeypatch.setattr(engine, "run", lambda *_: 0)
    assert program.main(["destroy", "--stack", "aws", "--yes"]) == 0, "the resources of the stack are deleted"
    lines = capsys.readouterr().err.splitlines()
    assert any(CARD.remove in line for line in lines)
    assert "not checked: volume: the Python package boto3 is missing. Fix: make install-doctor" in lines
    assert lines[-1].startswith("stack aws: 1 orphan: run the commands")


def test_destroy_that_failed_is_not_followed_by_a_search(
    cloud: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infra.automation import command as engine

    cloud(("network interface", lambda: [CARD]))
    monkeypatch.setattr(engine, "run", lambda *_: 1)
    assert program.main(["destroy", "--stack", "aws", "--yes"]) == 1
    assert "eni-1" not in capsys.readouterr().err


_WAITING = """
import sys, time
from infra.clouds import Cloud
from infra.findings.model import Check, ok
from infra.findings.orphans import Search
from types import SimpleNamespace
def wait():
    sys.stderr.write("searching\\n"); sys.stderr.flush(); time.sleep(60); return []
Cloud.orphans = property(lambda _: SimpleNamespace(CLUSTER="c", searches=lambda context: [Search("disk", wait)]))
Cloud.doctor = property(lambda _: SimpleNamespace(checks=lambda context: [Check("credentials", lambda: ok("a"))]))
from infra.__main__ import main
sys.exit(main(["orphans", "--stack", "aws"]))
"""


def test_ctrl_c_ends_a_search_at_once(pulumi: Callable[..., Path]) -> None:
    pulumi({})
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITING], cwd=root, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stderr
    lines: list[str] = []
    while "searching\n" not in lines:
        lines.append(process.stderr.readline())
        assert lines[-1], f"the search ended early: {''.join(lines)}"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "cancelled"
    assert "Traceback" not in rest


def _set(monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    """Put a value into the configuration of every stack that is read."""
    read = stack_files.read
    monkeypatch.setattr(stack_files, "read", lambda name, _, *rest: read(name, {key: value}, *rest))


def test_a_wrong_setting_that_the_search_does_not_need_is_ignored(
    cloud: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(("volume", lambda: [DISK]))
    _set(monkeypatch, "gpu.nodes.max", "0")
    assert program.main(["orphans", "--stack", "aws"]) == 1
    assert DISK.remove in capsys.readouterr().out


@pytest.mark.parametrize(("key", "value"), [("aws:region", "moon"), ("storage.on_destroy", "burn")])
def test_a_wrong_setting_that_the_search_needs_is_an_error(
    cloud: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: str,
) -> None:
    cloud(("volume", lambda: []))
    _set(monkeypatch, key, value)
    assert program.main(["orphans", "--stack", "aws"]) == 2
    assert f"{key}: " in capsys.readouterr().err, "another region would look as if nothing were left"
