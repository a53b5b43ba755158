"""The options of the `preprocess` command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.cli.arguments import CommandParser, integer_from, integers_from, number_above
from trainer.cli.progress import KINDS, Kind
from trainer.config import CRITEO_1TB_ROWS, CRITEO_NUM_SPARSE
from trainer.errors import UserError

KAGGLE_DAYS = 7  # train.txt has seven consecutive days; facebookresearch/dlrm splits it into seven equal parts
FREQUENCY_THRESHOLD = 3  # torchrec.datasets.criteo.FREQUENCY_THRESHOLD
MIN_MEMORY_GIB = 1.0  # the libraries, and a bucket of the shuffle twice: 1 Mi rows of 160 B


@dataclass(frozen=True)
class Options:
    """Input, output format, and the resources to use."""

    input: str
    output: str
    ids: Literal["raw", "hash", "frequency"]
    rows: tuple[int, ...]  # 26, for ids = hash; else empty
    threshold: int
    shuffle: bool
    seed: int
    format: Literal["npy", "parquet"]
    days: tuple[int, ...] | None
    cut_days: int
    bad_rows: Literal["error", "skip"]
    memory_gib: float
    workers: int
    progress: Kind

    def for_result(self) -> dict[str, Any]:
        """Return the options that the result depends on; a run resumes only with the same ones."""
        every = asdict(self) | {"rows": list(self.rows), "days": list(self.days) if self.days else None}
        if not self.shuffle:
            del every["seed"]
        if self.ids != "frequency":
            del every["threshold"]
        return {key: every[key] for key in every if key not in ("output", "memory_gib", "workers", "progress")}


def parser() -> CommandParser:
    """Return the parser of the command."""
    flags = CommandParser(
        "preprocess", "Converts Criteo click logs (TSV) to npy or Parquet files that the trainer reads."
    )
    add = flags.add_argument
    add("--input", required=True, metavar="PATH", help="train.txt (Kaggle), or a file or folder of day_N[.gz] (1 TB); "
        "any path or URI (s3://, gs://, abfs://)")  # fmt: skip
    add("--output", required=True, metavar="DIR", help="output folder; unfinished work is kept in DIR/.staging")
    add("--ids", choices=("raw", "hash", "frequency"), default="raw", help="raw: unchanged 32-bit numbers; hash: "
        "hashed to --rows; frequency: contiguous numbers, 1 for all ids rarer than --threshold")  # fmt: skip
    add("--rows", type=_rows, default=(), metavar="N", help="rows per feature for --ids hash: one number, 26 separated "
        "by commas, or criteo-1tb")  # fmt: skip
    add("--threshold", type=integer_from(1), default=FREQUENCY_THRESHOLD, metavar="N", help="minimum count of an "
        "id to get its own number (--ids frequency)")  # fmt: skip
    add("--shuffle", action="store_true", help="shuffle the rows of all days but the last, which is for evaluation")
    add("--seed", type=integer_from(0), default=0, metavar="N", help="seed of --shuffle")
    add("--format", choices=("npy", "parquet"), default="npy", help="npy: day_N_{dense,sparse,labels}.npy; parquet: "
        "train/day_N.parquet, and eval/ for the last day")  # fmt: skip
    add("--days", type=integers_from(0), default=None, metavar="N,N", help="days of a folder to read; all if not given")
    add(
        "--cut-days",
        type=integer_from(1),
        default=KAGGLE_DAYS,
        metavar="N",
        help="number of equal parts that a single file is split into",
    )
    add("--bad-rows", choices=("error", "skip"), default="error", help="error: a malformed row ends the command; "
        "skip: it is skipped and counted")  # fmt: skip
    add("--memory-gib", type=number_above(0), default=2.0, metavar="X", help="memory limit")
    add("--workers", type=integer_from(1), default=len(os.sched_getaffinity(0)), metavar="N", help="threads")
    add("--progress", choices=KINDS, default="auto", help="auto: a bar on a terminal, else JSON lines")
    return flags


def read_options(arguments: Sequence[str]) -> Options:
    """Parse the command line; raise UserError for a wrong option."""
    found = vars(parser().read(arguments))
    found.pop("config", None)
    options = Options(**found)
    if options.ids == "hash" and not options.rows:
        raise UserError("preprocess: --ids hash needs --rows: got none. Fix: for example, add --rows 1000000")
    if options.ids != "hash" and options.rows:
        raise UserError(f"preprocess: --rows does not apply: got --ids {options.ids}; allowed: --ids hash")
    if options.memory_gib < MIN_MEMORY_GIB:
        raise UserError(
            f"preprocess: --memory-gib is too small: got {options.memory_gib:g}; allowed: {MIN_MEMORY_GIB:g} or more"
        )
    return options


def _rows(text: str) -> tuple[int, ...]:
    from argparse import ArgumentTypeError

    if text == "criteo-1tb":
        return CRITEO_1TB_ROWS
    rows: tuple[int, ...] = integers_from(1)(text)
    if len(rows) == 1:
        rows *= CRITEO_NUM_SPARSE
    if len(rows) != CRITEO_NUM_SPARSE or max(rows) >= 2**31:
        raise ArgumentTypeError(f"got {text!r}; allowed: one number below 2**31, or {CRITEO_NUM_SPARSE} of them")
    return rows
