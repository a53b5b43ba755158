"""Facts that the real program computes from each `Pulumi.<stack>.yaml`, for tests that change one setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from provider_mocks.recording import run_stack

from trainer.config import TrainConfig
from workloads import component
from workloads.facts import Facts
from workloads.settings import JobSettings

ROOT = Path(__file__).resolve().parents[2]

CLOUDS = ("aws", "azure", "gcp", "local")
LAUNCHERS = ("job", "pytorchjob", "trainjob")
IMAGE = f"registry.example/trainer@sha256:{'0' * 64}"


@cache
def record_facts(stack: str, overrides: tuple[tuple[str, Any], ...] = ()) -> Facts:
    """Return the facts of a stack with the repository's settings and a fixed image reference."""
    found: list[Facts] = []
    real = component.resolve_facts

    def resolve_facts(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        output.apply(found.append)
        return output

    with mock.patch.object(component, "resolve_facts", resolve_facts):
        recording = run_stack(stack, dict(overrides))
    if recording.error:
        raise recording.error
    (facts,) = found
    return replace(facts, image=IMAGE)


def facts(stack: str = "local", job: Mapping[str, Any] | None = None, **changes: Any) -> Facts:
    """Return the stack's facts with changed keys of `job` and changed fields."""
    before = record_facts(stack)
    settings = JobSettings.model_validate(before.job.model_dump() | dict(job or {}))
    after = replace(before, job=settings, **changes)
    if settings.run != before.job.run:
        after = replace(after, config=with_settings(after.config, train={"run": settings.run}))
    return after


def with_settings(config: TrainConfig, **sections: Mapping[str, Any]) -> TrainConfig:
    """Return the trainer's settings with changed values in some sections."""
    values = config.model_dump()
    for section, own in sections.items():
        values[section] |= dict(own)
    return TrainConfig.model_validate(values)


#: Every option that can be combined.
EVERYTHING: dict[str, Any] = {
    "dataset": {"source": "bucket", "options": ["--ids=hash"]},
    "netcheck": {"enabled": True, "min_gb_per_s": 40},
}


def operators_variables(launcher: str, index: int, port: int) -> dict[str, str]:
    """Return the variables that each operator sets in pod `index` of two; `tests/cluster` checks them."""
    if launcher == "pytorchjob":
        return {
            "PET_NNODES": "2:2",
            "PET_NPROC_PER_NODE": "1",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_MAX_RESTARTS": "10",
            "PYTHONUNBUFFERED": "1",
        }
    if launcher == "trainjob":
        return {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "JOB_COMPLETION_INDEX": str(index),
        }
    return {}
