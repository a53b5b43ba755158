"""The Pulumi program, run with each `Pulumi.<stack>.yaml` of the repository."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from provider_mocks.recording import ROOT, SDKS, SHARED_SDKS, Recording, run_stack, stacks
from pydantic import BaseModel

from infra.config.settings import AddonSettings, Nodes, StackSettings, StorageSettings
from workloads.settings import JobSettings

STACKS = tuple(stacks())
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_registers_exactly_the_resources_of_its_golden_list(name: str, stack: Callable[..., Recording]) -> None:
    path = GOLDEN / f"{name}.txt"
    found = "".join(f"{line}\n" for line in stack(name).tree())
    if os.environ.get("REWRITE_GOLDEN") == "1":
        path.write_text(found)
    assert path.read_text() == found, (
        "logical names, types and parents make URNs: changing one replaces a resource in use; "
        "if that is intended, run with REWRITE_GOLDEN=1 and review the difference"
    )


@pytest.mark.parametrize("name", STACKS)
def test_every_documented_output_is_exported(name: str, stack: Callable[..., Recording]) -> None:
    recording = stack(name)
    expected = {
        "account",
        "cluster_name",
        "kubeconfig",
        "bucket_uri",
        "checkpoint_uri",
        "registry",
        "hourly_cost_usd",
        "next_steps",
        "job",
    }
    assert set(recording.exports) == expected
    assert "kubeconfig" in recording.secret_exports
    assert any("kubectl" in line for line in recording.exports["next_steps"])


@pytest.mark.parametrize("name", STACKS)
def test_no_custom_resource_lacks_a_provider_or_a_parent(name: str, stack: Callable[..., Recording]) -> None:
    orphans = [f"{item.type} {item.name}" for item in stack(name).registrations if item.custom and not item.parent_name]
    assert not orphans, "a resource outside a component escapes its options and its deletion order"


@pytest.mark.parametrize("name", STACKS)
def test_a_claim_keeps_its_request_when_its_volume_grows(name: str, stack: Callable[..., Recording]) -> None:
    claim = stack(name).one("kubernetes:core/v1:PersistentVolumeClaim")
    assert claim.ignored == ("spec.resources",), "the API server cannot resize the claim of an existing volume"


def test_an_invalid_stack_registers_nothing(stack: Callable[..., Recording]) -> None:
    recording = stack("local", {"gpu.nodes.desired": 9, "kubeconfig.context": "missing"}, fails=True)
    assert "gpu.nodes.desired" in str(recording.error)
    assert "kubeconfig.context" in str(recording.error), "all problems in one message"
    assert type(recording.error).__name__ == "RunError", "Pulumi shows a RunError without a stack trace"
    assert recording.registrations == []


def test_an_error_in_the_program_is_recorded(kubeconfig: Path) -> None:
    assert run_stack("local", {"cloud": "nowhere"}).error is not None


def test_the_defaults_of_pulumi_yaml_equal_those_of_the_settings() -> None:
    declared = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["config"]
    classes: dict[str, type[BaseModel]] = {
        "job": JobSettings,
        "gpu.nodes": Nodes,
        "storage": StorageSettings,
        "addons": AddonSettings,
        "": StackSettings,
    }
    for path, entry in declared.items():
        if "default" in entry:
            section, _, key = path.rpartition(".")
            assert entry["default"] == classes[section].model_fields[key].default, path


LOADED = """
import json, runpy, sys
sys.path[:0] = [{root!r}, {tests!r}]
from provider_mocks.recording import run_stack
error = run_stack({stack!r}).error
assert error is None, error
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("name", STACKS)
def test_only_the_chosen_clouds_folder_and_sdk_are_imported(name: str, kubeconfig: Path) -> None:
    cloud = yaml.safe_load((ROOT / f"Pulumi.{name}.yaml").read_text())["config"]["torchrec-cloud:cloud"]
    script = LOADED.format(root=str(ROOT), tests=str(ROOT / "tests" / "support"), stack=name)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(yaml.safe_load(run.stdout))
    folders = {module.split(".")[2] for module in modules if module.startswith("infra.clouds.")}
    assert folders == {cloud}
    sdks = {module for module in modules if module.startswith("pulumi_") and "." not in module}
    assert sdks <= SDKS[cloud] | SHARED_SDKS, "another cloud's SDK costs seconds and hundreds of megabytes"
    assert not {"torch", "torchrec"} & modules


def test_a_stack_runs_in_a_thread_whose_event_loop_runs_in_another_thread() -> None:
    """Simulate adlfs, which leaves such a loop in the calling thread."""
    left = asyncio.new_event_loop()
    thread = threading.Thread(target=left.run_forever)
    thread.start()
    asyncio.set_event_loop(left)
    try:
        assert run_stack("local").error is None
    finally:
        left.call_soon_threadsafe(left.stop)
        thread.join()
        left.close()
