"""Sources of samples: synthetic data, Criteo npy files, Parquet files or a class of the user."""

from trainer.data.base import Batch, KnowsBestAuc, Source, SourceContext, jagged_batch, one_id_batch
from trainer.data.sources.registry import open_source

__all__ = ["Batch", "KnowsBestAuc", "Source", "SourceContext", "jagged_batch", "one_id_batch", "open_source"]
