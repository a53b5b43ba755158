"""The options of the `plan` command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.planning.roofline import GPUS, STEP_FLOOR_MS

HELP_HINT = "Fix: see `python -m trainer plan --help`"


@dataclass(frozen=True)
class PlanOptions:
    """The hardware to plan for: GPU nodes, or without `gpus_per_node` CPU nodes like this machine."""

    nodes: int = 1
    nproc: int = 2
    gpus_per_node: int = 0
    gpu: str | None = None
    hbm_gib: float | None = None
    hbm_gb_per_second: float | None = None
    nvlink_gb_per_second: float = 0.0
    network_gbps: float | None = None
    tflops: float | None = None
    pcie_gb_per_second: float | None = None
    step_floor_ms: float = STEP_FLOOR_MS
    host_memory_gib: float | None = None

    def to_arguments(self) -> list[str]:
        """Return the options as arguments for the processes that a launcher starts.

        Without --nproc: the launcher would read it as the start of its own options.
        """
        given = {key: value for key, value in vars(self).items() if value is not None and key != "nproc"}
        return [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; all others belong to the trainer."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer plan", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes [1]")
    parser.add_argument("--nproc", type=int, default=2, help="without GPUs: processes per node, measured here [2]")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="GPUs per node; 0: CPU nodes like this one [0]")
    parser.add_argument("--gpu", default=None, help=f"model; peak and PCIe are known for {', '.join(GPUS)}")
    parser.add_argument("--hbm-gib", type=float, default=None, help="memory of one GPU")
    parser.add_argument("--hbm-gb-per-second", type=float, default=None, help="memory bandwidth of one GPU")
    parser.add_argument("--nvlink-gb-per-second", type=float, default=0.0, help="both directions together; 0: none [0]")
    parser.add_argument("--network-gbps", type=float, default=None, help="of a node; required for more than one node")
    parser.add_argument("--tflops", type=float, default=None, help="peak in the precision used [that of --gpu]")
    parser.add_argument("--pcie-gb-per-second", type=float, default=None, help="host to one GPU [that of --gpu]")
    parser.add_argument(
        "--step-floor-ms", type=float, default=STEP_FLOOR_MS, help=f"kernel launches of a step [{STEP_FLOOR_MS}]"
    )
    parser.add_argument(
        "--host-memory-gib", type=float, default=None, help="of a node, for tables that do not fit into HBM"
    )
    return parser


def parse_options(arguments: list[str]) -> tuple[PlanOptions, list[str]]:
    """Return the command's own options and the arguments that are left; raise UserError for a wrong value."""
    try:
        found, rest = options_parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"plan: {error}. {HELP_HINT}") from None
    values: dict[str, Any] = vars(found)
    for name, value in values.items():
        minimum = 1 if name in ("nodes", "nproc") else 0
        if isinstance(value, int | float) and value < minimum:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"plan: {option} is too small: got {value:g}; allowed: {minimum} or more")
    return PlanOptions(**values), rest
