"""The predict command: write the probabilities of an exported model for the rows of Parquet files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK
from trainer.storage.atomic_write import atomic_replace

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from trainer.config import ParquetConfig
    from trainer.data.sources.parquet_files import ParquetFile
    from trainer.export.exported_model import ExportedModel


def predict_main(arguments: list[str]) -> int:
    """Run `predict --model FOLDER --input PATH --output FILE [--batch-size N]`; rows keep the order of the input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer predict", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--input")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--batch-size", type=int, default=8_192)
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"predict: {error}") from None
    if unknown:
        raise UserError(f"predict: unknown option {unknown[0]}; allowed: --model, --input, --output, --batch-size")
    for name in ("model", "input", "output"):
        if getattr(options, name) is None:
            raise UserError(f"predict: --{name} is missing. Fix: see `python -m trainer predict --help`")
    if options.batch_size < 1:
        raise UserError(f"predict: wrong --batch-size: got {options.batch_size}; allowed: 1 or more")
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    from trainer.export.exported_model import load

    rows = predict(load(options.model), options.input, options.output, options.batch_size)
    print(f"wrote {rows:,} probabilities to {options.output}")  # noqa: T201
    return EXIT_OK


def predict(exported: ExportedModel, source: str, output: Path, batch_size: int) -> int:
    """Write column `probability` (float32) for every row of `source` and return the number of rows.

    The output appears only when it is complete.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from rich.progress import Progress

    from trainer.data.sources.parquet_files import open_files

    files, columns = open_files(source, "--input"), feature_columns(exported)
    total, done = sum(sum(file.group_sizes) for file in files), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("probability", pa.float32())])
    with (
        atomic_replace(output) as part,
        pq.ParquetWriter(part, schema) as writer,
        Progress(transient=True) as bar,
    ):
        task = bar.add_task("predicting", total=total)
        for file, first_row, table in _groups(files, columns):
            for features in _batches(exported, columns, table, file, first_row, batch_size):
                probability = exported.predict(features.dense, features.sparse)
                writer.write_table(pa.table({"probability": probability.numpy()}, schema=schema))
                done += features.dense.shape[0]
                bar.update(task, completed=done)
    return done


def feature_columns(exported: ExportedModel) -> ParquetConfig:
    """Return the columns of Parquet training data, else the names of the features (dense_0 .., cat_0 ..)."""
    from trainer.config import ParquetConfig

    data = exported.config.data
    if data.source == "parquet":
        return data.parquet
    return ParquetConfig.model_validate({"dense": list(data.dense_features), "sparse": list(data.sparse_features)})


@dataclass(frozen=True)
class _Features:
    """The features of B rows: `dense` (B, num_dense) float32 and F sparse features."""

    dense: Tensor
    sparse: KeyedJaggedTensor


def _groups(files: list[ParquetFile], columns: ParquetConfig) -> Iterator[tuple[ParquetFile, int, pa.Table]]:
    """Yield (file, first row, table) of every row group; raise UserError if a file lacks a column."""
    names = list(dict.fromkeys([*(c.column for c in columns.dense), *(c.column for c in columns.sparse)]))
    for file in files:
        missing = [name for name in names if name not in file.schema.names]
        if missing:
            raise UserError(
                f"--input {file.path} lacks a column of the model: got {', '.join(file.schema.names)}; "
                f"needed: {missing[0]}"
            )
    for file in files:
        first = 0
        for group, size in enumerate(file.group_sizes):
            if size:
                yield file, first, file.read_group(group, names)
            first += size


def _batches(
    exported: ExportedModel, columns: ParquetConfig, table: pa.Table, file: ParquetFile, first: int, batch_size: int
) -> Iterator[_Features]:
    """Yield the rows of a row group, `batch_size` at a time; errors name the row of the file."""
    import numpy as np
    import torch

    from trainer.data import jagged_batch
    from trainer.data.sources.columns import dense_values, sparse_ids

    config = exported.config
    for start in range(0, table.num_rows, batch_size):
        part = table.slice(start, batch_size)

        def where(i: int, begin: int = first + start) -> str:
            return f"row {begin + i} of {file.path}"

        dense = np.stack([dense_values(part[c.column], c, where) for c in columns.dense], axis=1)
        ids = [
            sparse_ids(part[c.column], c, r, where) for c, r in zip(columns.sparse, config.rows_per_table, strict=True)
        ]
        values: list[Any] = [torch.from_numpy(i.values.astype(np.int64)) for i in ids]
        lengths: list[Any] = [
            torch.ones(part.num_rows, dtype=torch.int32) if i.offsets is None else torch.from_numpy(i.lengths)
            for i in ids
        ]
        batch = jagged_batch(
            config.data.sparse_features,
            None,
            torch.from_numpy(dense),
            values,
            lengths,
            torch.zeros(part.num_rows),
            first + start,
        )
        yield _Features(batch.dense_BD, batch.sparse)
