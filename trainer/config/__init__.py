"""The trainer's configuration and how it is loaded. Imports only the standard library and pydantic."""

from trainer.config.data import (
    CRITEO_NUM_DENSE,
    CRITEO_NUM_SPARSE,
    CriteoConfig,
    DataConfig,
    DenseColumn,
    ParquetConfig,
    SparseColumn,
)
from trainer.config.model import CRITEO_1TB_ROWS, ModelConfig, ShardingConfig
from trainer.config.optim import DenseOptimConfig, OptimConfig, ScheduleConfig, SparseOptimConfig
from trainer.config.schema import TrainConfig, leaves
from trainer.config.section import Section
from trainer.config.training import RUN_NAME, CheckpointConfig, FaultConfig, MetricsConfig, TrainLoopConfig

__all__ = [
    "CRITEO_1TB_ROWS",
    "CRITEO_NUM_DENSE",
    "CRITEO_NUM_SPARSE",
    "RUN_NAME",
    "CheckpointConfig",
    "CriteoConfig",
    "DataConfig",
    "DenseColumn",
    "DenseOptimConfig",
    "FaultConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimConfig",
    "ParquetConfig",
    "ScheduleConfig",
    "Section",
    "ShardingConfig",
    "SparseColumn",
    "SparseOptimConfig",
    "TrainConfig",
    "TrainLoopConfig",
    "leaves",
]
