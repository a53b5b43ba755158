"""The command line of the engine's verbs, and outputs; no engine is started."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from provider_mocks.recording import ROOT

from infra import __main__ as command
from infra.automation import CancelledError, OperationError
from infra.automation import command as verbs
from infra.automation.display import Display
from infra.automation.engine import Engine, require_environment
from infra.automation.outputs import parse_outputs


def test_a_missing_pulumi_command_names_the_version_and_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OperationError, match=r"no `pulumi` on PATH; version 3\.206\.0 or newer.*get\.pulumi\.com"):
        Engine(print)


@pytest.mark.parametrize(
    ("script", "expected"), [("echo v3.100.0", "3.100.0; version 3.206.0 or newer"), ("exit 3", "does not run")]
)
def test_an_outdated_or_broken_pulumi_command_is_rejected(
    script: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pulumi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "pulumi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(OperationError, match=expected) as error:
        Engine(print)
    assert error.value.exit_code == 2


def test_without_a_terminal_destroy_needs_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(verbs, "LiveStack", _fail)
    assert command.main(["destroy", "--stack", "local"]) == 2
    assert "--yes" in capsys.readouterr().err


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("the stack was opened")


def test_destroy_asks_for_the_stacks_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = io.StringIO("yes\n")
    answer.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", answer)
    monkeypatch.setattr(verbs, "LiveStack", _fail)
    assert command.main(["destroy", "--stack", "local"]) == CancelledError("").exit_code
    assert "nothing was changed" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["gpu.nodes.max", "=4", ""])
def test_a_set_option_without_assignment_is_an_error(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["cost", "--stack", "aws", "--set", word]) == 2
    assert "key=value" in capsys.readouterr().err


def test_a_policy_configuration_without_a_pack_is_an_error(tmp_path: Path) -> None:
    arguments = argparse.Namespace(stack="local", cwd=ROOT, policy_pack=None, policy_config=tmp_path)
    with pytest.raises(OperationError, match="add --policy-pack"):
        verbs._open_stack(arguments, Display(io.StringIO()))


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


def test_outputs_have_types_and_hide_the_kubeconfig() -> None:
    found = parse_outputs("dev", OUTPUTS)
    assert found.hourly_cost_usd.on_demand_at_max == 88.8
    assert found.hourly_cost_usd.spot_at_max is None
    assert found.registry is None
    assert "very secret" not in repr(found)
    assert "very secret" not in json.dumps(found.as_dict())
    assert found.as_dict(secrets=True)["kubeconfig"] == "very secret"


def test_printed_outputs_end_with_the_next_steps(capsys: pytest.CaptureFixture[str]) -> None:
    verbs._print_outputs(parse_outputs("dev", OUTPUTS), argparse.Namespace(json=False), secrets=False)
    shown = capsys.readouterr().out
    assert "registry         -\n" in shown
    assert "on_demand 44.9, spot -, on_demand_at_max 88.8" in shown
    assert shown.endswith("next steps:\n  kubectl get pods\n")
    assert "very secret" not in shown


def test_outputs_of_a_stack_that_is_not_up_name_the_command_to_run() -> None:
    with pytest.raises(OperationError, match=r"has no outputs.*infra up --stack dev"):
        parse_outputs("dev", {})
    with pytest.raises(OperationError, match="has no output job"):
        parse_outputs("dev", {key: value for key, value in OUTPUTS.items() if key != "job"})


def test_the_typed_outputs_match_the_exports_of_a_stack(stack: Any) -> None:
    import dataclasses

    from infra.automation import StackOutputs

    assert {item.name for item in dataclasses.fields(StackOutputs)} == set(stack("local").exports)


def test_a_project_without_its_environment_is_refused_before_the_engine_installs_one(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text())
    with pytest.raises(OperationError, match=r"no Python environment: .*Fix: make install-infra$"):
        require_environment(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    require_environment(tmp_path)
    (tmp_path / "Pulumi.yaml").write_text("name: small\nruntime: python\n")
    python.unlink()
    require_environment(tmp_path)  # without `virtualenv`, the engine uses this process's Python
