"""What the engine's verbs tell a person: progress, errors and their fixes, outputs. No engine is started here."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from provider_mocks.recording import ROOT, stack_config
from pulumi.automation import CommandResult, EngineEvent
from pulumi.automation.errors import create_command_error

from infra import __main__ as command
from infra import clouds
from infra import stack_files as configuration
from infra.automation import CancelledError, OperationError
from infra.automation import command as verbs
from infra.automation.diagnosis import Attempt, cause, explain, unknown
from infra.automation.display import Display
from infra.automation.engine import Engine
from infra.automation.outputs import typed
from infra.automation.progress import Complaint, Progress
from infra.config.problems import SettingsError

STACK = "urn:pulumi:dev::torchrec-cloud::"
VPC = STACK + "torchrec-cloud:aws:Network$aws:ec2/vpc:Vpc::aws-network-vpc"


def failure(stderr: str) -> Any:
    return create_command_error(CommandResult("", stderr, 255))


def event(kind: str, **body: Any) -> EngineEvent:
    return EngineEvent.from_json({"sequence": 1, "timestamp": 0, kind: body})


def step(kind: str, op: str, urn: str = VPC) -> EngineEvent:
    return event(kind, metadata={"op": op, "urn": urn, "type": "t", "provider": "p"})


def diagnostic(message: str, severity: str, urn: str = VPC) -> EngineEvent:
    return event("diagnosticEvent", message=message, color="never", severity=severity, urn=urn)


# Progress


def test_a_finished_resource_is_one_line_with_its_action_and_seconds() -> None:
    lines: list[str] = []
    times = iter([10.0, 10.0, 22.5, 22.5])
    progress = Progress(planning=False, say=lines.append, clock=lambda: next(times))
    progress.event(step("resourcePreEvent", "create"))
    assert [item.action for item, _ in progress.running.values()] == ["creating"]
    progress.event(step("resOutputsEvent", "create"))
    assert progress.running == {}
    assert lines == ["created           aws:ec2/vpc:Vpc  aws-network-vpc  12.5 s"]
    assert progress.summary(13) == "1 created in 13.0 s"


def test_a_plan_names_a_replacement_once() -> None:
    progress = Progress(planning=True, say=lambda _: None)
    for op in ("create-replacement", "delete-replaced"):
        progress.event(step("resourcePreEvent", op))
    assert progress.counts == {"replace": 1}
    assert progress.summary(1) == "1 to replace in 1.0 s"


def test_what_stays_the_same_is_counted_and_not_listed() -> None:
    lines: list[str] = []
    progress = Progress(planning=False, say=lines.append)
    progress.event(step("resourcePreEvent", "same"))
    progress.event(step("resourcePreEvent", "same", STACK + "pulumi:pulumi:Stack::torchrec-cloud-dev"))
    assert lines == []
    assert progress.summary(1) == "1 unchanged in 1.0 s", "the stack itself is no resource of a person's"


def test_a_trace_of_a_stopped_program_is_not_shown() -> None:
    lines: list[str] = []
    progress = Progress(planning=False, say=lines.append)
    for text in ("hello", "Traceback (most recent call last):", '  File "x"', "KeyboardInterrupt"):
        progress.event(diagnostic(text, "info#err"))
    assert lines == ["hello"]


def test_a_failed_resource_is_told_and_kept_for_the_end() -> None:
    lines: list[str] = []
    progress = Progress(planning=False, say=lines.append)
    progress.event(step("resourcePreEvent", "create"))
    progress.event(diagnostic("<{%reset%}>no quota<{%reset%}>", "error"))
    progress.event(step("resOpFailedEvent", "create"))
    assert lines[0].startswith("FAILED creating")
    assert progress.complaints == [Complaint("no quota", "aws:ec2/vpc:Vpc", "aws-network-vpc")]


def test_without_a_terminal_lines_are_plain() -> None:
    stream = io.StringIO()
    display = Display(stream)
    with display.following("up of stack dev", Progress(planning=False, say=display.line)):
        display.line("created  a")
    assert stream.getvalue() == "up of stack dev ...\ncreated  a\n"


def test_on_a_terminal_what_is_under_way_is_shown_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    display = Display(stream)
    progress = Progress(planning=False, say=display.line)
    progress.event(step("resourcePreEvent", "create"))
    with display.following("up of stack dev", progress):
        display.line("created  a")
    assert "created  a" in stream.getvalue()
    assert "aws-network-vpc" in stream.getvalue()


# Errors

ATTEMPT = Attempt("up", "dev", "3 resources in the state")


def test_a_provider_error_names_the_resource_the_cause_what_is_left_and_what_to_run_next() -> None:
    message = "1 error occurred:\n\t* creating EC2 VPC: VpcLimitExceeded: The maximum number of VPCs has been reached."
    noise = Complaint("update failed", "pulumi:pulumi:Stack", "s")
    found = explain(failure(""), ATTEMPT, [Complaint(message, "aws:ec2/vpc:Vpc", "net"), noise], [])
    first, *rest = str(found).splitlines()
    assert first == (
        "aws:ec2/vpc:Vpc net: creating EC2 VPC: VpcLimitExceeded: The maximum number of VPCs has been reached."
    )
    assert "3 resources in the state" in rest[0]
    assert "python -m infra up --stack dev" in rest[1]
    assert "python -m infra destroy --stack dev" in rest[1]
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("sdk-v2/provider2.go:572: sdk.helper_schema: creating X: no: provider=aws@7.51.1", "creating X: no"),
        ('Traceback (most recent call last):\n  File "a", line 1\nException: boom\nmore', "boom"),
        ('Program failed:\nTraceback (most recent call last):\n  File "a"\n    x\nValueError: broken', "broken"),
        ("azure: Code=\n  QuotaExceeded", "azure: Code= QuotaExceeded"),
    ],
)
def test_a_cause_is_one_line_without_trace_or_plumbing(message: str, told: str) -> None:
    assert cause(message) == told


LOCK = (
    "error: the stack is currently locked by 1 lock(s). Either wait for the other process(es) to end or delete the "
    "lock file with `pulumi cancel`.\n  file:///s/x.json: created by ann@laptop (pid 28211) at 2026-11-21T15:24:37Z"
)
USER_MISTAKES = [
    (LOCK, ["ann@laptop (pid 28211)", "pulumi cancel --stack dev"]),
    ("error: [409] Conflict: Another update is currently in progress.", ["pulumi cancel --stack dev"]),
    ("error: get stack secrets manager: incorrect passphrase", ["wrong passphrase", "PULUMI_CONFIG_PASSPHRASE"]),
    ("error: passphrase must be set with PULUMI_CONFIG_PASSPHRASE", ["export PULUMI_CONFIG_PASSPHRASE=..."]),
    ("error: PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions", ["pulumi login --local"]),
]


@pytest.mark.parametrize(("said", "told"), USER_MISTAKES)
def test_what_keeps_an_operation_from_starting_is_one_line_with_its_mend(said: str, told: list[str]) -> None:
    found = explain(failure(said), Attempt("up", "dev"), [], [])
    assert "\n" not in str(found)
    assert all(text in str(found) for text in told), found
    assert found.exit_code == 2


REFUSALS = {
    "aws": [
        "operation error STS: GetCallerIdentity, StatusCode: 403, api error ExpiredToken: The security token included "
        "in the request is expired",
        "No valid credential sources found. Please see https://registry.terraform.io/providers/hashicorp/aws",
        "refresh cached SSO token failed, the SSO session has expired or is invalid",
    ],
    "azure": [
        "could not get token from Azure CLI: ERROR: AADSTS70043: The refresh token has expired or is invalid",
        "ERROR: Please run 'az login' to setup account.",
    ],
    "gcp": [
        'oauth2: cannot fetch token: 400 Bad Request {"error": "invalid_grant", "error_subtype": "invalid_rapt"}',
        "google: could not find default credentials. See https://cloud.google.com/docs/authentication",
    ],
    "local": ["the server has asked for the client to provide credentials"],
}


@pytest.mark.parametrize(("cloud", "message"), [(cloud, text) for cloud in REFUSALS for text in REFUSALS[cloud]])
def test_expired_credentials_are_recognised_and_the_login_named(cloud: str, message: str) -> None:
    found = explain(failure(""), ATTEMPT, [Complaint(message, "pulumi:providers:x", "default")], [])
    assert str(found).startswith(f"{cloud} refuses the credentials")
    assert clouds.load(cloud).login in str(found)
    assert "3 resources in the state" in str(found)
    assert found.exit_code == 2


def test_every_cloud_has_messages_that_are_tested_here() -> None:
    assert set(REFUSALS) == set(clouds.available())


def test_settings_that_the_program_refuses_are_told_in_its_own_words() -> None:
    message = str(SettingsError("dev", list(_problems())))
    found = explain(failure(""), ATTEMPT, [Complaint(message, "pulumi:pulumi:Stack", "s")], [])
    assert str(found) == message
    assert found.exit_code == 2


def _problems() -> Any:
    try:
        configuration.Configuration("torchrec-cloud", "gcp", stack_config("gcp", {"gpu.nodes.max": 0})).parse()
    except SettingsError as error:
        return error.problems
    raise AssertionError("0 nodes at most and 2 to start with are legal")


def test_policy_violations_name_resource_and_rule() -> None:
    found = explain(failure(""), ATTEMPT, [], [Complaint("images-by-digest: runs x", "kubernetes:batch/v1:Job", "j")])
    assert "kubernetes:batch/v1:Job j: images-by-digest: runs x" in str(found)
    assert "--policy-config" in str(found)


def test_an_unknown_stack_lists_those_that_exist() -> None:
    told = str(unknown("dev", ["aws", "gcp"], ["aws", "local"]))
    assert "'dev'" in told
    assert "aws, gcp" in told
    assert "python -m infra up --stack local" in str(unknown("local", [], ["aws", "local"]))


# The command


def test_without_the_command_it_is_said_which_version_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OperationError, match=r"no `pulumi` on PATH; version 3\.206\.0 or newer.*get\.pulumi\.com"):
        Engine(print)


@pytest.mark.parametrize(
    ("script", "told"), [("echo v3.100.0", "3.100.0; version 3.206.0 or newer"), ("exit 3", "does not run")]
)
def test_a_command_that_is_too_old_or_broken_is_refused(
    script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pulumi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "pulumi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(OperationError, match=told) as error:
        Engine(print)
    assert error.value.exit_code == 2


def test_without_a_terminal_nobody_is_asked_and_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(verbs, "LiveStack", _never)
    assert command.main(["destroy", "--stack", "local"]) == 2
    assert "--yes" in capsys.readouterr().err


def _never(*_: object, **__: object) -> None:
    raise AssertionError("the stack was opened")


def test_destroy_asks_for_the_stacks_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = io.StringIO("yes\n")
    answer.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", answer)
    monkeypatch.setattr(verbs, "LiveStack", _never)
    assert command.main(["destroy", "--stack", "local"]) == CancelledError("").exit_code
    assert "nothing was changed" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["gpu.nodes.max", "=4", ""])
def test_a_set_that_is_no_assignment_is_told(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["cost", "--stack", "aws", "--set", word]) == 2
    assert "key=value" in capsys.readouterr().err


def test_a_policy_configuration_without_a_pack_is_not_skipped_in_silence(tmp_path: Path) -> None:
    arguments = argparse.Namespace(stack="local", cwd=ROOT, policy_pack=None, policy_config=tmp_path)
    with pytest.raises(OperationError, match="add --policy-pack"):
        verbs._open(arguments, Display(io.StringIO()))


# Configuration and cost, without an engine


def test_a_stack_file_is_read_with_the_projects_defaults_in_the_engines_spelling(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text(
        "name: torchrec-cloud\n"
        "config:\n"
        "  cloud: {type: string}\n"
        "  namespace: {type: string, default: training}\n"
        "  gpu.nodes.min: {type: integer, default: 0}\n"
        "  gpu.nodes.max: {type: integer, default: 2}\n"
        "  addons.kueue: {type: boolean, default: false}\n"
    )
    (tmp_path / "Pulumi.x.yaml").write_text(
        "config:\n  aws:region: us-west-2\n  torchrec-cloud:gpu: {type: t, nodes: {max: 9}}\n  torchrec-cloud:n: 3\n"
    )
    values = configuration.read("x", {"tags.extra.team": "ads", "gpu.nodes.desired": 7}, tmp_path).values
    assert {key: _decoded(text) for key, text in values.items()} == {
        "aws:region": "us-west-2",
        "torchrec-cloud:n": "3",
        "torchrec-cloud:namespace": "training",
        "torchrec-cloud:gpu": {"type": "t", "nodes": {"min": 0, "desired": 7, "max": 9}},
        "torchrec-cloud:addons": {"kueue": False},
        "torchrec-cloud:tags": {"extra": {"team": "ads"}},
    }


def _decoded(text: str) -> object:
    return json.loads(text) if text.startswith(("{", "[")) else text


def test_a_list_is_set_by_index_and_a_secret_is_not_decrypted(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: torchrec-cloud\n")
    (tmp_path / "Pulumi.x.yaml").write_text("config:\n  torchrec-cloud:job: {token: {secure: v1:abc}}\n")
    values = configuration.read("x", {"network.authorized_cidrs[1]": "a", "aws:region": "r"}, tmp_path).values
    assert json.loads(values["torchrec-cloud:network"]) == {"authorized_cidrs": [None, "a"]}
    assert values["aws:region"] == "r"
    assert json.loads(values["torchrec-cloud:job"]) == {"token": configuration.ENCRYPTED}


def test_the_sections_that_are_checked_elsewhere_are_those_of_the_workloads() -> None:
    from workloads.settings import SECTIONS

    assert set(configuration.UNCHECKED_SECTIONS) == set(SECTIONS)


def test_a_mistake_in_set_is_mended_where_it_was_made() -> None:
    with pytest.raises(SettingsError) as error:
        configuration.read("gcp", {"gpu.nodez": "1", "gpu.nodes.max": "0"}).parse()
    fixes = {problem.key: problem.fix for problem in error.value.problems}
    assert fixes["gpu.nodez"] == "leave --set gpu.nodez=... out"
    assert fixes["gpu.nodes.desired"].startswith("pulumi config set"), "this one is in the file"


def test_the_cost_is_that_of_the_outputs_and_needs_no_engine() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "infra", "cost", "--stack", "gcp", "--set", "gpu.nodes.max=4", "--json"],
        cwd=ROOT,
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(shown.stdout)
    from infra.outputs import hourly_cost

    settings = configuration.read("gcp", {"gpu.nodes.max": "4"}).parse().settings
    assert found["hourly_cost_usd"] == hourly_cost(settings)
    total = sum(item["on_demand_usd_per_hour_at_max"] for item in found["items"])
    assert round(total, 4) == found["hourly_cost_usd"]["on_demand_at_max"]


def test_the_cost_of_an_unknown_stack_lists_the_files_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["cost", "--stack", "nope"]) == 2
    assert "aws, azure, gcp, local" in capsys.readouterr().err


# Outputs

OUTPUTS: dict[str, Any] = yaml.safe_load("""
account: "123456789012"
cluster_name: c
kubeconfig: very secret
bucket_uri: s3://b
checkpoint_uri: s3://b/checkpoints
hourly_cost_usd: {on_demand: 44.9, on_demand_at_max: 88.8, spot: null}
next_steps: [kubectl get pods]
job: {run: default}
""")


def test_outputs_have_types_and_do_not_print_the_kubeconfig() -> None:
    found = typed("dev", OUTPUTS)
    assert found.hourly_cost_usd.on_demand_at_max == 88.8
    assert found.hourly_cost_usd.spot_at_max is None
    assert found.registry is None
    assert "very secret" not in repr(found)
    assert "very secret" not in json.dumps(found.shown())
    assert found.shown(secrets=True)["kubeconfig"] == "very secret"


def test_outputs_on_a_terminal_end_with_what_to_run_next(capsys: pytest.CaptureFixture[str]) -> None:
    verbs._show(typed("dev", OUTPUTS), argparse.Namespace(json=False), secrets=False)
    shown = capsys.readouterr().out
    assert "registry         -\n" in shown
    assert "on_demand 44.9, spot -, on_demand_at_max 88.8" in shown
    assert shown.endswith("next steps:\n  kubectl get pods\n")
    assert "very secret" not in shown


def test_outputs_of_a_stack_that_is_not_up_say_what_to_run() -> None:
    with pytest.raises(OperationError, match=r"has no outputs.*infra up --stack dev"):
        typed("dev", {})
    with pytest.raises(OperationError, match="has no output job"):
        typed("dev", {key: value for key, value in OUTPUTS.items() if key != "job"})


def test_the_typed_outputs_are_those_that_every_stack_exports(stack: Any) -> None:
    import dataclasses

    from infra.automation import StackOutputs

    assert {item.name for item in dataclasses.fields(StackOutputs)} == set(stack("local").exports)
