"""A SIGKILL of any process at any moment loses only the steps since the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from killed import BATCH, CHANGES, STEPS, History, killed_run, killed_runs
from machines import Attempt, Machines, result_of

KILLS = {1: 6, 2: 14}  # by number of processes: 20 in all


@dataclass
class KilledRuns:
    """Runs of one number of processes that were killed, and one that was not."""

    histories: list[History]
    undisturbed: Attempt
    kills: int


@pytest.fixture(scope="module", params=KILLS, ids=lambda world: f"{world}-processes")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KilledRuns:
    world = request.param
    undisturbed = Machines(tmp_path_factory.mktemp("quiet"), CHANGES).start(world)
    assert undisturbed.wait() == [0] * world

    def make() -> Machines:
        return Machines(tmp_path_factory.mktemp("killed"))

    return KilledRuns(killed_runs(make, [world], KILLS[world], seed=100 * world), undisturbed, KILLS[world])


def test_as_many_processes_were_killed_as_planned(runs: KilledRuns) -> None:
    assert sum(history.kills for history in runs.histories) == runs.kills
    assert sum(history.resumes for history in runs.histories) > runs.kills // 3, "resuming is hardly tested"


def test_kills_do_not_change_the_final_loss(runs: KilledRuns) -> None:
    expected = result_of(runs.undisturbed)
    for history in runs.histories:
        assert history.result["loss"] == expected["loss"]
        assert history.result["auc"] == expected["auc"]


def test_kills_do_not_change_the_loss_of_any_step(runs: KilledRuns) -> None:
    expected = {e["step"]: e["loss"] for e in runs.undisturbed.events() if e["event"] == "train"}
    assert list(expected) == list(range(1, STEPS + 1))
    for history in runs.histories:
        assert history.losses() == expected


def test_no_sample_is_repeated_or_skipped(runs: KilledRuns) -> None:
    for history in runs.histories:
        assert history.misplaced_samples() == 0
        assert history.result["position"] == STEPS * BATCH


def test_no_partial_checkpoint_is_left(runs: KilledRuns) -> None:
    for history in runs.histories:
        steps = sorted((history.attempts[0].log.parent / "a" / "checkpoints").iterdir())
        assert len(steps) <= 2, f"checkpoint.keep is 2: {steps}"
        assert all((step / "COMPLETE.json").exists() for step in steps), steps


@pytest.mark.parametrize("plan", ["table_wise", "data_parallel"])
def test_three_restarted_processes_resume_bit_for_bit(plan: str, tmp_path: Path) -> None:
    """Test three processes: a sum of two numbers does not depend on their order, a sum of three does."""
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    changes = {**CHANGES, "sharding.types": [plan], "model.over_arch": [300_000 // 16, 16, 1]}
    whole = Machines(tmp_path / "whole", changes).finished(3, train__steps=9)
    halves = Machines(tmp_path / "halves", changes)
    halves.finished(3, train__steps=6)
    assert halves.finished(3, train__steps=9)["loss"] == whole["loss"]


def test_a_run_whose_size_changes_at_every_kill_ends_near_the_same_loss(tmp_path: Path) -> None:
    alone = Machines(tmp_path / "alone", CHANGES)
    alone.folder.mkdir()
    expected = alone.finished(1)["loss"]
    (tmp_path / "mixed").mkdir()
    history = killed_run(Machines(tmp_path / "mixed"), [2, 1, 3, 4], 4, seed=3)
    assert history.misplaced_samples() == 0
    assert history.result["loss"] == pytest.approx(expected, abs=2e-3), "sums in another order, but the same training"
