"""The `plan` command: whether a model fits, how many bytes a step moves, how fast it can be, and what limits it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from trainer.planning.options import parse_options
from trainer.planning.roofline import GIB


def plan_main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run the command: for GPUs by calculation, for CPUs by measuring as many processes as a node would have."""
    options, rest = parse_options(arguments)
    from trainer.config.options import load_config
    from trainer.planning.plan import predict_on_gpus, predict_on_this_machine
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    if options.gpus_per_node:
        _show(predict_on_gpus(load_config(rest, environ), options))
        return 0
    if "WORLD_SIZE" not in environ and options.nproc > 1:
        from trainer.launch.launcher import launch

        return launch(["--nproc", str(options.nproc), "plan", *options.to_arguments(), *rest])
    config = load_config(rest, environ)
    from trainer.runtime.process_group import init_runtime

    with init_runtime(config.train, dict(os.environ)) as runtime:
        prediction = predict_on_this_machine(config, options, runtime)
        if runtime.is_main:
            _show(prediction)
    return 0


def plan_rows(prediction: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a prediction as the rows of a table."""
    sizes, in_host = prediction["bytes_per_rank"], max(prediction["host_bytes_per_rank"])
    host_tables = f"up to {in_host / GIB:,.1f} GiB: too large for the device, so their rows are read over the link"
    limits = [(f"bound of {name}", f"{rate:,.0f} samples/s") for name, rate in prediction["bounds"].items()]
    return [
        ("hardware", prediction["hardware"]),
        ("precision", prediction["precision"]),
        ("samples per step", f"{prediction['batch_size']:,} over {prediction['processes']} processes"),
        ("bytes per rank", f"{min(sizes) / GIB:,.3f} to {max(sizes) / GIB:,.3f} GiB (weights, optimizer state)"),
        *([("tables in host memory", host_tables)] if in_host else []),
        ("all-to-all per rank and step", f"{prediction['all_to_all_bytes_per_step'] / 1e6:,.1f} MB sent"),
        ("all-reduce per step", f"{prediction['all_reduce_bytes_per_step'] / 1e6:,.1f} MB"),
        *limits,
        ("predicted", f"{prediction['samples_per_second']:,.0f} samples/s, {prediction['step_ms']:,.1f} ms per step"),
        ("limited by", prediction["limiting"]),
    ]


def _show(prediction: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Plan", show_header=False)
    for name, value in plan_rows(prediction):
        table.add_row(name, value, style="bold" if name in ("predicted", "limited by") else None)
    Console().print(table)
    sys.stdout.write(json.dumps(prediction) + "\n")
