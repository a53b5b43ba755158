"""The manifests of each cloud by each launcher, frozen: a change is read in review before a job is replaced by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from workload_facts import CLOUDS, EVERYTHING, LAUNCHERS, facts

from workloads.manifests import manifests

GOLDEN = Path(__file__).parent / "golden"
#: What a launcher makes; the rest is the same for all of them.
OWN = ("job",)


class _Plain(yaml.SafeDumper):
    """Writes a value that occurs twice twice: a reader of the file looks for no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _same(path: Path, found: dict[str, Any]) -> None:
    text = yaml.dump(found, Dumper=_Plain, sort_keys=True, width=110)
    if os.environ.get("REWRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "if that is wanted, run with REWRITE_GOLDEN=1 and read the difference in review"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_job_is_the_one_of_its_golden_file(cloud: str, launcher: str) -> None:
    found = manifests(facts(cloud, {"launcher": launcher}))
    _same(GOLDEN / f"{cloud}-{launcher}.yaml", {key: item for key, item in found.items() if key.startswith(OWN)})


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_companions_are_those_of_their_golden_file(cloud: str) -> None:
    found = manifests(facts(cloud, EVERYTHING, queued=True, monitored=True))
    _same(GOLDEN / f"{cloud}.yaml", {key: item for key, item in found.items() if not key.startswith(OWN)})
