"""Facts as the real program makes them from each real `Pulumi.<stack>.yaml`, for tests that change one thing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests" / "infra"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from infra_mocks import run_stack  # noqa: E402

from trainer.config import TrainConfig  # noqa: E402
from workloads import component  # noqa: E402
from workloads.facts import Facts  # noqa: E402
from workloads.settings import JobSettings  # noqa: E402

CLOUDS = ("aws", "azure", "gcp", "local")
LAUNCHERS = ("job", "pytorchjob", "trainjob")
IMAGE = f"registry.example/trainer@sha256:{'0' * 64}"


@cache
def recorded(stack: str, overrides: tuple[tuple[str, Any], ...] = ()) -> Facts:
    """The facts of a stack as it stands in the repository; the image's reference does not follow the sources."""
    found: list[Facts] = []
    real = component.resolve

    def resolve(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        output.apply(found.append)
        return output

    with mock.patch.object(component, "resolve", resolve):
        recording = run_stack(stack, dict(overrides))
    if recording.error:
        raise recording.error
    (facts,) = found
    return replace(facts, image=IMAGE)


def facts(stack: str = "local", job: Mapping[str, Any] | None = None, **changes: Any) -> Facts:
    """The stack's facts with other keys of `job` and other fields."""
    before = recorded(stack)
    settings = JobSettings.model_validate(before.job.model_dump() | dict(job or {}))
    after = replace(before, job=settings, **changes)
    if settings.run != before.job.run:
        after = replace(after, config=with_settings(after.config, train={"run": settings.run}))
    return after


def with_settings(config: TrainConfig, **sections: Mapping[str, Any]) -> TrainConfig:
    """The trainer's settings with other values in some sections."""
    values = config.model_dump()
    for section, own in sections.items():
        values[section] |= dict(own)
    return TrainConfig.model_validate(values)


#: Everything that can be asked for at once.
EVERYTHING: dict[str, Any] = {
    "dataset": {"source": "bucket", "options": ["--ids=hash"]},
    "netcheck": {"enabled": True, "min_gb_per_s": 40},
}
