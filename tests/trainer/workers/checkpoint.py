"""A worker of torch.distributed.run that resumes runs. Rank 0 writes <results>/<name>.pt.

Arguments: the folder of results, `all` or `resume`, the folder of a checkpoint that another number of processes wrote,
and for `all` the folder for new checkpoints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_jobs import PLANS, SCHEDULE, checkpointer, full_weights, logits, steps, tiny

from trainer.checkpoint import Progress
from trainer.runtime.process_group import Runtime, init_runtime
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model

# Covers every dense and every sparse optimizer, and every plan.
EXACT: dict[str, dict[str, Any]] = {
    "table_wise-sgd-momentum": PLANS["table_wise"]
    | {"optim.sparse.optimizer": "sgd", "optim.dense.optimizer": "sgd", "optim.dense.momentum": 0.9},
    "row_wise-adagrad-adagrad": PLANS["row_wise"] | {"optim.sparse.optimizer": "adagrad"},
    "mixed-adagrad-adamw": PLANS["mixed"] | {"optim.sparse.optimizer": "adagrad", "optim.dense.optimizer": "adamw"},
    "data_parallel-rowwise_adagrad-adam": PLANS["data_parallel"] | {"optim.dense.optimizer": "adam"},
    "table_wise-rowwise_adagrad-clipped": PLANS["table_wise"] | {"optim.dense.clip_norm": 0.01},
    "column_wise-sgd-adagrad": PLANS["column_wise"] | {"optim.sparse.optimizer": "sgd"},
    "column_wise-rowwise_adagrad-adagrad": PLANS["column_wise"],
}


def new_model(changes: dict[str, Any], run: str, uri: Path, runtime: Runtime) -> ShardedModel:
    """Return a new model of the run `run` with its checkpoints under `uri`."""
    return build_sharded_model(tiny(SCHEDULE | changes | {"train.run": run, "checkpoint.uri": str(uri)}), runtime)


def restore(model: ShardedModel) -> Progress:
    """Restore the newest checkpoint of the model's run."""
    store = checkpointer(model)
    newest = store.newest()
    assert newest is not None, "there is no checkpoint"
    return store.restore(newest)


def exact(changes: dict[str, Any], run: str, uri: Path, runtime: Runtime) -> dict[str, Any]:
    """Train ten steps at once, and five before and five after a save and a restore."""
    whole = new_model(changes, run, uri, runtime)
    losses = steps(whole, 10)
    first = new_model(changes, run, uri, runtime)
    first_half = steps(first, 5)
    checkpointer(first).save(Progress(5, 5 * first.config.train.batch_size))
    second = new_model(changes, run, uri, runtime)
    continued = steps(second, 5, restore(second))
    return {
        "losses": losses,
        "resumed": first_half + continued,
        "weights": full_weights(whole),
        "resumed_weights": full_weights(second),
    }


def resumed(changes: dict[str, Any], run: str, uri: Path, runtime: Runtime) -> dict[str, Any]:
    """Return the weights of a checkpoint under this plan and number of processes, and the next losses."""
    model = new_model(changes, run, uri, runtime)
    progress = restore(model)
    weights = full_weights(model)
    return {"progress": progress, "weights": weights, "next": steps(model, 3, progress)}


def round_trip(run: str, uri: Path, runtime: Runtime) -> dict[str, Any]:
    """Save under one plan, then restore and save under each plan in turn, the first one last."""
    first = new_model(PLANS["table_wise"], run, uri, runtime)
    steps(first, 5)
    weights = full_weights(first)
    progress = Progress(5, 5 * first.config.train.batch_size)
    checkpointer(first).save(progress)
    expected = steps(first, 3, progress)
    found = {}
    for plan in ("row_wise", "column_wise", "data_parallel", "mixed", "table_wise"):
        model = new_model(PLANS[plan], run, uri, runtime)
        restore(model)
        found[plan] = {"weights": full_weights(model)}
        checkpointer(model).save(progress)
        found[plan]["next"] = steps(model, 3, progress)
    return {"weights": weights, "next": expected, "found": found}


def main() -> None:
    """Run all scenarios, one after another, in one job."""
    results, mode, given = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with init_runtime(tiny().train, dict(os.environ)) as runtime:

        def keep(name: str, result: dict[str, Any]) -> None:
            if runtime.is_main:
                torch.save(result, results / f"{name}.pt")

        for plan in PLANS:
            keep(f"resumed-{plan}", resumed(PLANS[plan], "given", given, runtime))
        if mode == "all":
            new = Path(sys.argv[4])
            for name, changes in EXACT.items():
                keep(f"exact-{name}", exact(changes, name.replace("_", "-"), new, runtime))
            keep("round-trip", round_trip("round-trip", new, runtime))
            mixed = new_model(PLANS["mixed"], "given", new, runtime)
            steps(mixed, 5)
            progress = Progress(5, 5 * mixed.config.train.batch_size)
            checkpointer(mixed).save(progress)
            mixed_logits = logits(mixed, 64)
            weights = full_weights(mixed)
            keep("made", {"weights": weights, "logits": mixed_logits, "next": steps(mixed, 3, progress)})


if __name__ == "__main__":
    main()
