"""kill -9 of any process at any moment costs steps since the last checkpoint, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from killed import BATCH, CHANGES, STEPS, Story, killed_run
from machines import Machines, Zygote, result_of

SEEDS = {1: (11, 6), 2: (2, 14)}  # processes -> seed, kills: 20 in all


@pytest.fixture(scope="module", params=SEEDS, ids=lambda world: f"{world}-processes")
def told(request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    world = request.param
    seed, kills = SEEDS[world]
    quiet = Machines(zygote, tmp_path_factory.mktemp("quiet"), CHANGES)
    undisturbed = quiet.start(world)
    assert undisturbed.wait() == [0] * world
    story = killed_run(Machines(zygote, tmp_path_factory.mktemp("killed")), [world], kills, seed)
    return story, undisturbed


def test_the_kills_really_happened(told: tuple[Story, object]) -> None:
    story, _ = told
    world = story.result["world_size"]
    assert story.kills == SEEDS[world][1], "the run was over before all kills had come: choose another seed"
    assert story.resumes > story.kills // 3, "most starts began anew, so resuming is hardly tested"


def test_the_final_loss_is_that_of_the_run_that_nobody_killed(told: tuple) -> None:
    story, undisturbed = told
    assert story.result["loss"] == result_of(undisturbed)["loss"]
    assert story.result["auc"] == result_of(undisturbed)["auc"]


def test_every_step_on_the_way_had_the_loss_that_it_has_without_kills(told: tuple) -> None:
    story, undisturbed = told
    expected = {e["step"]: e["loss"] for e in undisturbed.events() if e["event"] == "train"}
    assert list(expected) == list(range(1, STEPS + 1))
    assert story.losses() == expected


def test_no_sample_is_repeated_or_skipped(told: tuple) -> None:
    story, _ = told
    assert story.misplaced_samples() == 0
    assert story.result["position"] == STEPS * BATCH


def test_no_half_written_checkpoint_is_left(told: tuple) -> None:
    story, _ = told
    folder: Path = story.attempts[0].log.parent / "a" / "checkpoints"
    steps = sorted(folder.iterdir())
    assert len(steps) <= 2, f"checkpoint.keep is 2: {steps}"
    assert all((step / "COMPLETE.json").exists() for step in steps), steps


def test_a_run_that_changes_its_size_at_every_kill_ends_close_to_the_others(
    zygote: Zygote, tmp_path: Path, machines: Machines
) -> None:
    alone = Machines(zygote, tmp_path / "alone", CHANGES)
    alone.folder.mkdir()
    expected = alone.finished(1)["loss"]
    (tmp_path / "mixed").mkdir()
    story = killed_run(Machines(zygote, tmp_path / "mixed"), [2, 1, 3, 4], 4, seed=3)
    assert story.misplaced_samples() == 0
    assert story.result["loss"] == pytest.approx(expected, abs=2e-3), "sums in another order, but the same training"
