"""Metrics of a run: quality by TorchRec's RecMetrics, and the sinks that events go to."""

from trainer.metrics.quality import Quality
from trainer.metrics.reporter import Reporter

__all__ = ["Quality", "Reporter"]
