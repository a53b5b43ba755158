"""Save or load checkpoints under every plan, as a process of a job of 1 to 4.

`save FOLDER` trains and saves under every plan as FOLDER/<world>-<plan>. `load FOLDER` loads the checkpoints of all
worlds, each under another plan, and saves them without training as FOLDER/<world>-<plan>-to-<world>-<plan>.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_jobs import PLANS, SCHEDULE, checkpointer, steps, tiny

from trainer.checkpoint import Checkpointer, Progress, open_store
from trainer.runtime.process_group import Runtime, init_runtime
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model

WORLDS = (1, 2, 3, 4)
DONE = Progress(3, 3 * 48)


def trips(to_world: int) -> Iterator[tuple[int, str, str]]:
    """Yield (world, plan, plan to load it under): each world and plan once, each pair of plans over all `to_world`."""
    names = list(PLANS)
    for world in WORLDS:
        for position, name in enumerate(names):
            yield world, name, names[(position + world + to_world) % len(names)]


def main(argv: list[str]) -> int:
    """Run one action and return exit code 0."""
    action = {"save": save, "load": load}[argv[0]]
    with init_runtime(tiny().train, dict(os.environ)) as runtime:
        action(Path(argv[1]), runtime)
    return 0


def save(folder: Path, runtime: Runtime) -> None:
    for name, plan in PLANS.items():
        model = new_model(folder / f"{runtime.world_size}-{name}", plan, runtime)
        steps(model, DONE.step)
        checkpointer(model).save(DONE)


def load(folder: Path, runtime: Runtime) -> None:
    for world, plan, to_plan in trips(runtime.world_size):
        saved = folder / f"{world}-{plan}"
        model = new_model(saved, PLANS[to_plan], runtime)
        progress = checkpointer(model).restore(DONE.step)
        again = f"{saved}-to-{runtime.world_size}-{to_plan}"
        Checkpointer(model, open_store(again, "a")).save(progress)


def new_model(folder: Path, plan: dict[str, Any], runtime: Runtime) -> ShardedModel:
    return build_sharded_model(tiny(SCHEDULE | plan | {"train.run": "a", "checkpoint.uri": str(folder)}), runtime)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
