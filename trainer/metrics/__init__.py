"""What a run reports: quality by TorchRec's metrics, and the sinks that people and dashboards read."""

from trainer.metrics.quality import Quality
from trainer.metrics.reporter import Reporter

__all__ = ["Quality", "Reporter"]
