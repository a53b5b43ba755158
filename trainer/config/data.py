"""Options of the data: where samples come from and what their columns mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainer.config.section import Count, Positive, Section

CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE = 13, 26


class DenseColumn(Section):
    """One numeric column of a Parquet table."""

    column: str = Field(description="column of the file")
    transform: Literal["none", "log1p", "standardize"] = Field(
        "none", description="log1p: log(1 + max(x, 0)); standardize: (x - mean) / std with the two values below"
    )
    mean: float = Field(0.0, description="subtracted when transform is standardize")
    std: float = Field(1.0, gt=0, description="divided by when transform is standardize")
    fill: float | None = Field(None, description="value for nulls and NaN, before the transform; without it an error")


class SparseColumn(Section):
    """One categorical column of a Parquet table; a list-typed column is a multi-valued feature."""

    column: str = Field(description="column of the file")
    rows: Positive | None = Field(None, description="rows of its table; without it model.num_embeddings decides")
    hash: bool = Field(False, description="map any integer or string to a row by a 64-bit hash modulo the rows")
    fill: int | str | None = Field(
        None, description="value for nulls; without it a null is an error (an empty list is not)"
    )


def _column_names(value: Any) -> Any:
    """Expand the short form `"age"` to `{"column": "age"}`."""
    return (
        [{"column": item} if isinstance(item, str) else item for item in value]
        if isinstance(value, (list, tuple))
        else value
    )


class ParquetConfig(Section):
    """The columns of the user's Parquet files: label, dense and sparse features."""

    label: str = Field("label", description="column with the label: 0/1, a boolean, or a probability in [0, 1]")
    dense: Annotated[tuple[DenseColumn, ...], BeforeValidator(_column_names)] = Field(
        (), description="numeric columns: names, or objects with column, transform, mean, std, fill"
    )
    sparse: Annotated[tuple[SparseColumn, ...], BeforeValidator(_column_names)] = Field(
        (), description="categorical columns: names, or objects with column, rows, hash, fill"
    )
    cache_groups: Positive = Field(4, description="decoded row groups kept in memory per process")


class CriteoConfig(Section):
    """Criteo as npy files, three per day.

    day_D_dense.npy holds float32 (N, 13), day_D_sparse.npy integers (N, 26), day_D_labels.npy integers (N).
    """

    train_days: tuple[Count, ...] = Field(tuple(range(23)), description="days to train on")
    eval_days: tuple[Count, ...] = Field((23,), description="days to evaluate on")
    block_rows: Positive = Field(
        65_536, description="rows of a block; blocks and the rows in each are shuffled in every epoch"
    )
    modulo_ids: bool = Field(False, description="map an id to row id modulo rows; without it an id >= rows is an error")


class DataConfig(Section):
    """The source of samples. Sample k of the stream is a pure function of (seed, k)."""

    source: str = Field(
        "synthetic",
        pattern=r"^(synthetic|criteo|parquet|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="synthetic, criteo, parquet, or package.module:Class (a trainer.data.Source)",
    )
    path: str | None = Field(
        None, description="criteo: folder; parquet: file, folder or fsspec URI of the training data"
    )
    eval_path: str | None = Field(None, description="parquet: file, folder or URI of the evaluation data")
    seed: Count = Field(1, description="seed of the stream: order of samples, synthetic values")
    shuffle: bool = Field(True, description="reshuffle a finite source in every epoch")
    num_dense: Count = Field(13, description="dense features (synthetic, custom)")
    num_sparse: Positive = Field(26, description="sparse features (synthetic, custom)")
    ids_per_feature: Positive = Field(1, description="ids per feature and sample (synthetic)")
    train_samples: Positive = Field(819_200, description="samples in an epoch (synthetic)")
    eval_samples: Count = Field(65_536, description="most samples of one evaluation; 0: all of a finite source")
    prefetch: Positive = Field(2, description="batches that a thread of each process prepares ahead")
    parquet: ParquetConfig = Field(default_factory=ParquetConfig, description="columns of Parquet files")
    criteo: CriteoConfig = Field(default_factory=CriteoConfig, description="layout of Criteo npy files")
    options: dict[str, Any] = Field(
        default_factory=dict, description="passed unchanged to a custom source class (JSON)"
    )

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        if self.source in ("criteo", "parquet") and not self.path:
            raise ValueError(f"data.path is missing: data.source {self.source} reads it. Fix: --data.path PATH")
        if self.source == "parquet" and not self.parquet.sparse:
            raise ValueError(
                "data.parquet.sparse is empty; allowed: one or more categorical columns. "
                'Fix: --data.parquet.sparse \'["user", "item"]\''
            )
        if self.source == "synthetic" and not self.eval_samples:
            raise ValueError(
                "data.eval_samples is too small for the endless synthetic stream: got 0; allowed: 1 or more"
            )
        overlap = sorted(set(self.criteo.train_days) & set(self.criteo.eval_days))
        if self.source == "criteo" and overlap:
            raise ValueError(
                f"data.criteo.eval_days overlaps train_days: got {overlap} in both; allowed: separate days, or the "
                f"evaluation sees training data"
            )
        return self

    @property
    def dense_features(self) -> tuple[str, ...]:
        """Return the names of the dense features, in the order of a batch's columns."""
        if self.source == "parquet":
            return tuple(c.column for c in self.parquet.dense)
        count = CRITEO_NUM_DENSE if self.source == "criteo" else self.num_dense
        return tuple(f"dense_{i}" for i in range(count))

    @property
    def sparse_features(self) -> tuple[str, ...]:
        """Return the names of the sparse features, in an order that no sharding plan changes."""
        if self.source == "parquet":
            return tuple(c.column for c in self.parquet.sparse)
        count = CRITEO_NUM_SPARSE if self.source == "criteo" else self.num_sparse
        return tuple(f"cat_{i}" for i in range(count))
