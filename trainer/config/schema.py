"""The root of the configuration: all sections and the rules between them.

Every leaf is an option of the command line (`--train.batch-size`), an environment variable
(`TRAINER_TRAIN__BATCH_SIZE`) and a key of a JSON, TOML or YAML file. `trainer.config.options` merges those sources.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from trainer.config.data import CRITEO_NUM_SPARSE, DataConfig
from trainer.config.model import CRITEO_1TB_ROWS, ModelConfig, ShardingConfig
from trainer.config.optim import OptimConfig
from trainer.config.section import Section
from trainer.config.training import CheckpointConfig, FaultConfig, MetricsConfig, TrainLoopConfig


class TrainConfig(Section):
    """All settings of a run."""

    data: DataConfig = Field(default_factory=DataConfig, description="samples")
    model: ModelConfig = Field(default_factory=ModelConfig, description="architecture")
    sharding: ShardingConfig = Field(default_factory=ShardingConfig, description="distribution of the tables")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizers and learning rate")
    train: TrainLoopConfig = Field(default_factory=TrainLoopConfig, description="length, batch, numerics")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    fault: FaultConfig = Field(default_factory=FaultConfig, description="preemption and hangs")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="reports")

    @model_validator(mode="after")
    def _check_sections(self) -> TrainConfig:
        features, rows = self.data.sparse_features, self.model.num_embeddings
        if len(set(features)) != len(features):
            twice = sorted({f for f in features if features.count(f) > 1})
            raise ValueError(
                f"data.parquet.sparse names a column more than once: got {twice}; allowed: one feature per column"
            )
        if isinstance(rows, tuple) and len(rows) != len(features):
            raise ValueError(
                f"model.num_embeddings does not match the {len(features)} sparse features: got {len(rows)} tables; "
                f"allowed: {len(features)} numbers, or one for all"
            )
        if rows == "criteo-1tb" and len(features) != CRITEO_NUM_SPARSE:
            raise ValueError(
                f"model.num_embeddings criteo-1tb has {CRITEO_NUM_SPARSE} tables: got {len(features)} sparse features; "
                f"allowed: {CRITEO_NUM_SPARSE}. Fix: --data.num-sparse {CRITEO_NUM_SPARSE}"
            )
        if not self.data.dense_features:
            raise ValueError(
                "DLRM's bottom MLP needs a dense feature: got none. Fix: set data.num_dense or data.parquet.dense"
            )
        unknown = sorted(set(self.sharding.tables) - set(self.table_names))
        if unknown:
            raise ValueError(
                f"sharding.tables names unknown tables: got {unknown}; allowed: {', '.join(self.table_names)}"
            )
        return self

    @property
    def table_names(self) -> tuple[str, ...]:
        """Return the name of each table, `t_<feature>`, in feature order."""
        return tuple(f"t_{feature}" for feature in self.data.sparse_features)

    @property
    def rows_per_table(self) -> tuple[int, ...]:
        """Return the rows of each table: the column's own number or model.num_embeddings, both capped."""
        count, given = len(self.data.sparse_features), self.model.num_embeddings
        rows = CRITEO_1TB_ROWS if given == "criteo-1tb" else (given,) * count if isinstance(given, int) else given
        if self.data.source == "parquet":
            rows = tuple(c.rows or r for c, r in zip(self.data.parquet.sparse, rows, strict=True))
        return tuple(min(r, self.model.num_embeddings_cap or r) for r in rows)

    @property
    def eval_batch_size(self) -> int:
        """Return the samples of one evaluation step, over all processes."""
        return self.train.eval_batch_size or self.train.batch_size

    def for_processes(self, world_size: int) -> TrainConfig:
        """Return the configuration with batch sizes over all of `world_size` processes."""
        if self.train.batch_size_is == "global":
            return self
        eval_size = self.train.eval_batch_size
        train = self.train.model_copy(
            update={
                "batch_size": self.train.batch_size * world_size,
                "eval_batch_size": None if eval_size is None else eval_size * world_size,
                "batch_size_is": "global",
            }
        )
        return self.model_copy(update={"train": train})

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if a batch size is not a multiple of `world_size`."""
        sizes = {"train.batch_size": self.train.batch_size, "train.eval_batch_size": self.eval_batch_size}
        for key, size in sizes.items():
            if size % world_size:
                below, above = size - size % world_size, size + world_size - size % world_size
                raise ValueError(
                    f"{key} does not divide by {world_size} processes: got {size}; allowed: multiples of "
                    f"{world_size}, such as {f'{below} or ' if below else ''}{above}. "
                    f"Fix: --{key.replace('_', '-')} {above}"
                )


def leaves(section: type[Section] = TrainConfig, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every option as path -> pydantic FieldInfo, in the order of the tree; lists and dicts are leaves."""
    found: dict[tuple[str, ...], Any] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= leaves(inner, (*prefix, name))
        else:
            found[(*prefix, name)] = field
    return found
