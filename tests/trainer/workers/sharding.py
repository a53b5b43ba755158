"""A worker of torch.distributed.run: tables, losses and weights of every plan, as <results>/<name>.pt of rank 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_jobs import PLANS, full_weights, steps, tiny

from trainer.runtime.process_group import Runtime, init_runtime
from trainer.sharding.planner import describe_plan
from trainer.sharding.sharded_model import build_sharded_model

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
PRECISIONS = {"fp16": "fp16", "int8": "fp16", "fp32": "fp16"}  # forward -> backward


def record(name: str, changes: dict[str, Any], runtime: Runtime, results: Path) -> None:
    """Build a model, train six steps, and save its plan, losses, and weights before and after."""
    config = tiny(changes)
    model = build_sharded_model(config, runtime)
    plan = describe_plan(model.plan, config)
    start = full_weights(model)
    losses = steps(model, 6)
    end = full_weights(model)
    if runtime.is_main:
        torch.save({"plan": plan, "start": start, "losses": losses, "end": end}, results / f"{name}.pt")


def main() -> None:
    """Run all scenarios, one after another, in one job."""
    results = Path(sys.argv[1])
    with init_runtime(tiny().train, dict(os.environ)) as runtime:
        for plan, changes in PLANS.items():
            for optimizer in OPTIMIZERS:
                record(f"{plan}-{optimizer}", changes | {"optim.sparse.optimizer": optimizer}, runtime, results)
        for forward, backward in PRECISIONS.items():
            wire = {"sharding.forward_precision": forward, "sharding.backward_precision": backward}
            record(f"wire-{forward}-{backward}", PLANS["table_wise"] | wire, runtime, results)
        several_ids = {"data.ids_per_feature": 3, "model.pooling": "mean"}
        for plan in ("row_wise", "mixed"):
            adagrad = several_ids | {"optim.sparse.optimizer": "adagrad"}
            record(f"{plan}-several", PLANS[plan] | adagrad, runtime, results)
        cross = {"model.interaction": "dcn", "optim.sparse.optimizer": "sgd"}
        record("dcn-mixed", PLANS["mixed"] | cross, runtime, results)


if __name__ == "__main__":
    main()
