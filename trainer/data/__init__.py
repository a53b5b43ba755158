"""Sources of samples: planted synthetic data, Criteo npy files, Parquet, or any class of the user's own."""

from trainer.data.base import Batch, KnowsBestAuc, Source, SourceContext, jagged_batch, one_id_batch
from trainer.data.sources.registry import open_source

__all__ = ["Batch", "KnowsBestAuc", "Source", "SourceContext", "jagged_batch", "one_id_batch", "open_source"]
