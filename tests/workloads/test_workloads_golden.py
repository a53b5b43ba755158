"""Golden manifests for each cloud and launcher, so that a change that replaces a job is seen in review."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from workload_facts import CLOUDS, EVERYTHING, LAUNCHERS, facts

from workloads.manifests import build_manifests

GOLDEN = Path(__file__).parent / "golden"
#: The prefix of a launcher's objects; the others are the same for all launchers.
LAUNCHER_PREFIX = "job"


class _NoAliases(yaml.SafeDumper):
    """A dumper that repeats a value instead of using anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Repeat every value."""
        return True


def assert_golden(path: Path, found: dict[str, Any]) -> None:
    """Compare objects with a golden file, or rewrite it with REWRITE_GOLDEN=1."""
    text = yaml.dump(found, Dumper=_NoAliases, sort_keys=True, width=110)
    if os.environ.get("REWRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "if this change is intended, run with REWRITE_GOLDEN=1 and review the difference"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_objects_of_a_launcher_match_their_golden_file(cloud: str, launcher: str) -> None:
    found = build_manifests(facts(cloud, {"launcher": launcher}))
    assert_golden(
        GOLDEN / f"{cloud}-{launcher}.yaml",
        {key: item for key, item in found.items() if key.startswith(LAUNCHER_PREFIX)},
    )


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_other_objects_match_their_golden_file(cloud: str) -> None:
    found = build_manifests(facts(cloud, EVERYTHING, queued=True, monitored=True))
    assert_golden(
        GOLDEN / f"{cloud}.yaml", {key: item for key, item in found.items() if not key.startswith(LAUNCHER_PREFIX)}
    )
