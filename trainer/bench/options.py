"""The bench command's own options, their help, and their mistakes. Imports no torch: help must answer at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from trainer.errors import UserError

_STEPS, _STEPS_PER_SAVE, _STEPS_OF_PROFILE = 20, 100, 10
MODES = ("data", "checkpoints", "preprocess", "profile", "quality")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how long. `side` and `store`: for the processes that this command starts itself."""

    blocks: int
    steps: int
    warmup: int
    data: bool = False
    checkpoints: bool = False
    preprocess: bool = False
    profile: bool = False
    quality: bool = False
    trace: str = "bench-trace.json"
    samples: int = 1_638_400
    seeds: int = 3
    side: str = ""
    store: str = ""

    def arguments(self) -> list[str]:
        """As the processes that measure read them."""
        given = [f"--{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in MODES]
        return given + [f"--{mode}" for mode in MODES if getattr(self, mode)]


def parser() -> argparse.ArgumentParser:
    """The command's own options; all others are the trainer's."""
    made = argparse.ArgumentParser(
        prog="python -m trainer bench", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    made.add_argument("--blocks", type=int, default=7, help="interleaved blocks of each side [7]")
    made.add_argument("--steps", type=int, help="steps of a block [20; 100 with --checkpoints, 10 with --profile]")
    made.add_argument("--warmup", type=int, default=5, help="steps before the first block [5]")
    made.add_argument("--nproc", default="auto", help="processes; auto: one per GPU, else 2 [auto]")
    mode = made.add_mutually_exclusive_group()
    mode.add_argument("--data", action="store_true", help="samples/s of the sources, and beside the step")
    mode.add_argument("--checkpoints", action="store_true", help="with saves and without")
    mode.add_argument("--preprocess", action="store_true", help="Criteo's text, beside TorchRec's own conversion")
    mode.add_argument("--profile", action="store_true", help="a Chrome trace and the ten heaviest operators")
    mode.add_argument("--quality", action="store_true", help="AUC of each fast mode beside fp32 stock")
    made.add_argument("--trace", default="bench-trace.json", help="file that --profile writes [bench-trace.json]")
    made.add_argument("--samples", type=int, default=1_638_400, help="that --quality trains on [1638400]")
    made.add_argument("--seeds", type=int, default=3, help="runs of each mode of --quality [3]")
    made.add_argument("--side", default="", help=argparse.SUPPRESS)
    made.add_argument("--store", default="", help=argparse.SUPPRESS)
    return made


def read_options(arguments: list[str]) -> tuple[BenchOptions, str, list[str]]:
    """The command's own options, --nproc, and what is left. Raises UserError for a value that is not legal."""
    try:
        found, rest = parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"bench: {error}; see `python -m trainer bench --help`") from None
    if found.steps is None:
        found.steps = _STEPS_PER_SAVE if found.checkpoints else _STEPS_OF_PROFILE if found.profile else _STEPS
    if min(found.blocks, found.steps, found.warmup) < 1:
        raise UserError(
            f"bench: --blocks is {found.blocks}, --steps {found.steps}, --warmup {found.warmup}; legal: 1 or more"
        )
    if min(found.samples, found.seeds) < 1:
        raise UserError(f"bench: --samples is {found.samples}, --seeds {found.seeds}; legal: 1 or more")
    nproc = found.nproc
    del found.nproc
    return BenchOptions(**vars(found)), nproc, rest
