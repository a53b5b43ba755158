"""Rows/s of the `preprocess` command and of TorchRec's BinaryCriteoUtils.tsv_to_npys, on the same generated rows."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl

from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE
from trainer.preprocess.options import read_options
from trainer.preprocess.run import Preprocess

_OURS_ROWS, _STOCK_ROWS = 1_000_000, 40_000  # a few seconds each; neither rate depends on the number of rows
_BLOCKS = 3


def bench_preprocess() -> dict[str, Any]:
    """Measure both in interleaved blocks, as npy with raw ids (the same arrays); the ratio is the median of pairs."""
    blocks: dict[str, list[float]] = {"ours": [], "stock": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_clicks(folder / "train.txt", _OURS_ROWS)
        write_clicks(folder / "few.txt", _STOCK_ROWS)
        import torchrec.datasets.criteo  # noqa: F401  # takes seconds, which must not count in the first block

        for block in range(_BLOCKS):
            began = time.perf_counter()
            stock_npys(folder / "few.txt", folder)
            blocks["stock"].append(_STOCK_ROWS / (time.perf_counter() - began))
            arguments = ["--input", str(folder / "train.txt"), "--output", str(folder / f"out{block}")]
            began = time.perf_counter()
            Preprocess(read_options([*arguments, "--progress", "none"])).run()
            blocks["ours"].append(_OURS_ROWS / (time.perf_counter() - began))
    ratios = [ours / stock for ours, stock in zip(blocks["ours"], blocks["stock"], strict=True)]
    medians = {name: statistics.median(rates) for name, rates in blocks.items()}
    rows = {"ours_rows": _OURS_ROWS, "stock_rows": _STOCK_ROWS}
    named = {f"{name}_blocks": rates for name, rates in blocks.items()}
    return {"preprocess": medians, "ratio": statistics.median(ratios)} | named | rows


def write_clicks(path: Path, rows: int, seed: int = 0) -> None:
    """Write rows like Criteo's: small skewed integers and hexadecimal ids, some of both missing."""
    draw = np.random.default_rng(seed)
    columns: dict[str, pl.Series] = {"label": pl.Series(draw.integers(0, 2, rows))}
    for i in range(CRITEO_NUM_DENSE):
        values = np.minimum(np.exp(draw.normal(3, 2, rows)), 60_000).astype(np.int32) - 3 * (i == 1)
        columns[f"int_{i}"] = _with_missing_values(pl.Series(values), draw, 0.2)
    for i in range(CRITEO_NUM_SPARSE):
        pool = pl.Series([f"{number:08x}" for number in draw.integers(0, 2**32, 20_000)])
        chosen = np.minimum(np.exp(draw.random(rows) * 10).astype(np.int64), 19_999)
        columns[f"cat_{i}"] = _with_missing_values(pool.gather(chosen), draw, 0.05)
    pl.DataFrame(columns).write_csv(path, separator="\t", include_header=False)


def _with_missing_values(values: pl.Series, draw: np.random.Generator, share: float) -> pl.Series:
    return values.set(pl.Series(draw.random(len(values)) < share), None)


def stock_npys(source: Path, folder: Path) -> dict[str, Path]:
    """Convert a file with TorchRec and return the paths of its arrays by part."""
    paths = {part: folder / f"stock_{part}.npy" for part in ("dense", "sparse", "labels")}
    from torchrec.datasets.criteo import BinaryCriteoUtils

    with _local_iopath():
        BinaryCriteoUtils.tsv_to_npys(str(source), *(str(path) for path in paths.values()))
    return paths


@contextmanager
def _local_iopath() -> Iterator[None]:
    """Replace iopath, which TorchRec uses but does not install, by a version for local files."""
    manager = types.SimpleNamespace(open=open, set_strict_kwargs_checking=lambda _: None)
    names = ("iopath", "iopath.common", "iopath.common.file_io")
    modules = {name: types.ModuleType(name) for name in names}
    vars(modules[names[-1]])["PathManagerFactory"] = lambda: types.SimpleNamespace(get=lambda *_: manager)
    with mock.patch.dict(sys.modules, modules):
        yield
