"""Configuration and cost of a stack, read from its files without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from provider_mocks.recording import ROOT

from infra import __main__ as command
from infra import stack_files as configuration
from infra.config.problems import SettingsError


def test_a_stack_file_is_read_with_the_projects_defaults_as_the_engine_reads_it(tmp_path: Path) -> None:
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
    assert {key: _decode(text) for key, text in values.items()} == {
        "aws:region": "us-west-2",
        "torchrec-cloud:n": "3",
        "torchrec-cloud:namespace": "training",
        "torchrec-cloud:gpu": {"type": "t", "nodes": {"min": 0, "desired": 7, "max": 9}},
        "torchrec-cloud:addons": {"kueue": False},
        "torchrec-cloud:tags": {"extra": {"team": "ads"}},
    }


def _decode(text: str) -> object:
    return json.loads(text) if text.startswith(("{", "[")) else text


def test_a_list_item_is_set_by_index_and_a_secret_is_not_decrypted(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: torchrec-cloud\n")
    (tmp_path / "Pulumi.x.yaml").write_text("config:\n  torchrec-cloud:job: {token: {secure: v1:abc}}\n")
    values = configuration.read("x", {"network.authorized_cidrs[1]": "a", "aws:region": "r"}, tmp_path).values
    assert json.loads(values["torchrec-cloud:network"]) == {"authorized_cidrs": [None, "a"]}
    assert values["aws:region"] == "r"
    assert json.loads(values["torchrec-cloud:job"]) == {"token": configuration.ENCRYPTED}


def test_the_unchecked_sections_are_those_of_the_workloads() -> None:
    from workloads.settings import SECTIONS

    assert set(configuration.UNCHECKED_SECTIONS) == set(SECTIONS)


def test_the_fix_for_a_set_option_names_the_option() -> None:
    with pytest.raises(SettingsError) as error:
        configuration.read("gcp", {"gpu.nodez": "1", "gpu.nodes.max": "0"}).parse()
    fixes = {problem.key: problem.fix for problem in error.value.problems}
    assert fixes["gpu.nodez"] == "leave --set gpu.nodez=... out"
    assert fixes["gpu.nodes.desired"] == "--set gpu.nodes.max=2", "the option decides, whatever the file contains"


def test_the_cost_command_prints_the_same_cost_as_the_outputs_without_an_engine() -> None:
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


def test_the_cost_of_an_unknown_stack_lists_the_stacks_with_a_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["cost", "--stack", "nope"]) == 2
    assert "aws, azure, gcp, local" in capsys.readouterr().err


def test_a_stack_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.prod.eu.yaml").write_text("config: {}\n")
    assert configuration.list_stacks(tmp_path) == ["prod.eu"]


def test_a_date_in_a_structured_value_is_text(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: torchrec-cloud\nruntime: python\n")
    (tmp_path / "Pulumi.lab.yaml").write_text("config:\n  torchrec-cloud:tags: {extra: {since: 2026-01-31}}\n")
    found = configuration.read("lab", folder=tmp_path).values["torchrec-cloud:tags"]
    assert json.loads(found) == {"extra": {"since": "2026-01-31"}}


@pytest.mark.parametrize("text", ["12:30", "yes", "on", "0:0"])
def test_a_plain_word_is_text_as_for_pulumi(tmp_path: Path, text: str) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: torchrec-cloud\nruntime: python\n")
    (tmp_path / "Pulumi.lab.yaml").write_text(f"config:\n  torchrec-cloud:maintenance: {{start: {text}, hours: 4}}\n")
    found = configuration.read("lab", folder=tmp_path).values["torchrec-cloud:maintenance"]
    assert json.loads(found) == {"start": text, "hours": 4}, "YAML 1.1 reads 12:30 as 750 and yes as true"


def test_a_renamed_key_of_the_command_line_names_the_option_with_the_new_key() -> None:
    with pytest.raises(SettingsError) as error:
        configuration.read("azure", {"kubernetes.version": "1.34"}).parse()
    fixes = {problem.key: problem.fix for problem in error.value.problems}
    assert fixes["kubernetes.version"] == (
        "--set cluster.kubernetes_version=1.34; leave --set kubernetes.version=... out"
    )
