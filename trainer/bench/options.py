"""The options of the `bench` command. Imports no torch, so that help prints immediately."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from trainer.errors import UserError

_STEPS, _STEPS_PER_SAVE, _STEPS_OF_PROFILE = 20, 100, 10
MODES = ("data", "checkpoints", "preprocess", "profile", "quality")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and how long. `side` and `store` are set for processes that the command starts itself."""

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
        """Return the options as arguments for the measuring processes."""
        given = [f"--{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in MODES]
        return given + [f"--{mode}" for mode in MODES if getattr(self, mode)]


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; all others belong to the trainer."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer bench", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--blocks", type=int, default=7, help="interleaved blocks per variant [7]")
    parser.add_argument("--steps", type=int, help="steps per block [20; 100 with --checkpoints, 10 with --profile]")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first block [5]")
    parser.add_argument("--nproc", default="auto", help="processes; auto: one per GPU, else 2 [auto]")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--data", action="store_true", help="samples/s of the sources, and of a step that reads them")
    mode.add_argument("--checkpoints", action="store_true", help="training with and without saves")
    mode.add_argument("--preprocess", action="store_true", help="Criteo text, compared with TorchRec's conversion")
    mode.add_argument("--profile", action="store_true", help="a Chrome trace and the ten heaviest operators")
    mode.add_argument("--quality", action="store_true", help="AUC of each fast mode, compared with fp32 stock")
    parser.add_argument("--trace", default="bench-trace.json", help="file that --profile writes [bench-trace.json]")
    parser.add_argument("--samples", type=int, default=1_638_400, help="training samples of --quality [1638400]")
    parser.add_argument("--seeds", type=int, default=3, help="runs per mode of --quality [3]")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    return parser


def read_options(arguments: list[str]) -> tuple[BenchOptions, str, list[str]]:
    """Return the command's own options, --nproc and the remaining arguments; raise UserError for a wrong value."""
    try:
        found, rest = options_parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"bench: {error}. Fix: see `python -m trainer bench --help`") from None
    if found.steps is None:
        found.steps = _STEPS_PER_SAVE if found.checkpoints else _STEPS_OF_PROFILE if found.profile else _STEPS
    for name in ("blocks", "steps", "warmup", "samples", "seeds"):
        if (value := getattr(found, name)) < 1:
            raise UserError(f"bench: --{name} is too small: got {value}; allowed: 1 or more")
    nproc = found.nproc
    del found.nproc
    return BenchOptions(**vars(found)), nproc, rest
