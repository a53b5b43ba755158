"""Checkpoints resume on any number of processes and under any plan: 1 to 4 processes and five plans each way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from machines import FAULTS_FOLDER, start_job
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from worlds import DONE, WORLDS, trips

from trainer.checkpoint import open_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of worlds.py, and what every world made of those of all."""
    made = tmp_path_factory.mktemp("worlds")
    for act in ("save", "load"):
        for world in WORLDS:
            log = made / f"{act}-{world}.log"
            job = start_job([[str(FAULTS_FOLDER / "worlds.py"), act, str(made)]] * world, log, {})
            assert job.wait() == [0] * world, log.read_text()[-6000:]
    return made


def canonical(folder: Path) -> dict[str, Tensor]:
    """Return all whole tensors of a checkpoint, without the column parts of averaged states."""
    store = open_store(str(folder), "a")
    tensors: dict[str, Tensor] = _load_state_dict_from_keys(storage_reader=store.reader(DONE.step))
    return {key: value for key, value in tensors.items() if ".by_columns." not in key}


@pytest.mark.parametrize("to_world", WORLDS)
def test_a_checkpoint_is_unchanged_when_another_world_loads_and_saves_it(to_world: int, folder: Path) -> None:
    for world, plan, to_plan in trips(to_world):
        source, copy = f"{world}-{plan}", f"{world}-{plan}-to-{to_world}-{to_plan}"
        expected, found = canonical(folder / source), canonical(folder / copy)
        assert len(expected) > 12
        assert expected.keys() == found.keys(), copy
        for key, value in expected.items():
            averaged = key.endswith(".sum") and key.startswith("tables.") and to_plan in ("column_wise", "mixed")
            exact = torch.equal(found[key], value)
            assert exact or (averaged and torch.allclose(found[key], value, rtol=1e-6, atol=0)), f"{copy}: {key}"


def test_every_pair_of_plans_is_covered() -> None:
    covered = {(plan, to_plan) for to_world in WORLDS for _, plan, to_plan in trips(to_world)}
    names = {plan for plan, _ in covered}
    assert covered == {(a, b) for a in names for b in names}
