"""Run by torch.distributed.run: resumes runs in several processes. Writes <results>/<name>.pt on rank 0.

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

# Every dense and every sparse optimizer once, and every plan.
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


def new_job(changes: dict[str, Any], run: str, uri: Path, runtime: Runtime) -> ShardedModel:
    """A job of the run `run` with its checkpoints under `uri`."""
    return build_sharded_model(tiny(SCHEDULE | changes | {"train.run": run, "checkpoint.uri": str(uri)}), runtime)


def restored(job: ShardedModel) -> Progress:
    """Resume the newest checkpoint of the job's run."""
    store = checkpointer(job)
    newest = store.newest()
    assert newest is not None, "there is no checkpoint"
    return store.restore(newest)


def exact(changes: dict[str, Any], run: str, uri: Path, runtime: Runtime) -> dict[str, Any]:
    """Ten steps, and five, a save, a new job and five more."""
    whole = new_job(changes, run, uri, runtime)
    losses = steps(whole, 10)
    first = new_job(changes, run, uri, runtime)
    begun = steps(first, 5)
    checkpointer(first).save(Progress(5, 5 * first.config.train.batch_size))
    second = new_job(changes, run, uri, runtime)
    continued = steps(second, 5, restored(second))
    return {
        "losses": losses,
        "resumed": begun + continued,
        "weights": full_weights(whole),
        "resumed_weights": full_weights(second),
    }


def resumed(changes: dict[str, Any], run: str, uri: Path, runtime: Runtime) -> dict[str, Any]:
    """What a checkpoint holds under this plan and this number of processes, and the next losses."""
    job = new_job(changes, run, uri, runtime)
    progress = restored(job)
    weights = full_weights(job)
    return {"progress": progress, "weights": weights, "next": steps(job, 3, progress)}


def round_trip(run: str, uri: Path, runtime: Runtime) -> dict[str, Any]:
    """Save under one plan, resume and save under the next, through all of them and back to the first."""
    first = new_job(PLANS["table_wise"], run, uri, runtime)
    steps(first, 5)
    weights = full_weights(first)
    progress = Progress(5, 5 * first.config.train.batch_size)
    checkpointer(first).save(progress)
    expected = steps(first, 3, progress)
    found = {}
    for plan in ("row_wise", "column_wise", "data_parallel", "mixed", "table_wise"):
        job = new_job(PLANS[plan], run, uri, runtime)
        restored(job)
        found[plan] = {"weights": full_weights(job)}
        checkpointer(job).save(progress)
        found[plan]["next"] = steps(job, 3, progress)
    return {"weights": weights, "next": expected, "found": found}


def main() -> None:
    """All scenarios, one after another in one job."""
    results, mode, given = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with init_runtime(tiny().train, dict(os.environ)) as runtime:

        def keep(name: str, result: dict[str, Any]) -> None:
            if runtime.is_main:
                torch.save(result, results / f"{name}.pt")

        for plan in PLANS:
            keep(f"resumed-{plan}", resumed(PLANS[plan], "given", given, runtime))
        if mode == "all":
            made = Path(sys.argv[4])
            for name, changes in EXACT.items():
                keep(f"exact-{name}", exact(changes, name.replace("_", "-"), made, runtime))
            keep("round-trip", round_trip("round-trip", made, runtime))
            made_here = new_job(PLANS["mixed"], "given", made, runtime)
            steps(made_here, 5)
            progress = Progress(5, 5 * made_here.config.train.batch_size)
            checkpointer(made_here).save(progress)
            made_logits = logits(made_here, 64)
            weights = full_weights(made_here)
            keep("made", {"weights": weights, "logits": made_logits, "next": steps(made_here, 3, progress)})


if __name__ == "__main__":
    main()
