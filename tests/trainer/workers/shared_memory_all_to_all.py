"""A worker of torch.distributed.run that trains, and evaluates other batch sizes, by shared memory and by gloo."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from small_jobs import PLANS, full_weights, logits, steps, tiny

from trainer.errors import UserError
from trainer.runtime.process_group import init_runtime
from trainer.sharding.sharded_model import build_sharded_model


def main() -> None:
    """Run all scenarios, one after another, in one job."""
    results = Path(sys.argv[1])
    with init_runtime(tiny().train, dict(os.environ)) as runtime:
        for plan in ("table_wise", "column_wise", "mixed"):
            for exchange in ("collective", "shared_memory", "auto"):
                several = {"data.ids_per_feature": 2}
                config = tiny(PLANS[plan] | several | {"sharding.exchange": exchange})
                model = build_sharded_model(config, runtime)
                losses = steps(model, 5)
                held_out = logits(model, 48 * 7)  # more samples than the memory allocated so far holds
                losses += steps(model, 5)
                found = {"fast": model.resolved, "losses": losses, "logits": held_out, "end": full_weights(model)}
                if runtime.is_main:
                    torch.save(found, results / f"{plan}-{exchange}.pt")
        for exchange in ("auto", "shared_memory"):
            quantised = {"sharding.forward_precision": "fp16", "sharding.exchange": exchange}
            try:
                used = build_sharded_model(tiny(PLANS["table_wise"] | quantised), runtime).resolved["exchange"]
            except UserError as error:
                used = str(error)
            if runtime.is_main:
                (results / f"quantised-{exchange}.txt").write_text(used, encoding="utf-8")


if __name__ == "__main__":
    main()
