"""The reporter sends the events of a run to the sinks that the configuration selects."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.checkpoint.store import is_local
from trainer.config import TrainConfig
from trainer.config.run_paths import run_uri
from trainer.errors import UserError
from trainer.metrics.console import open_console
from trainer.metrics.json_lines import JsonLines
from trainer.metrics.prometheus import Prometheus
from trainer.metrics.sink import Sink
from trainer.metrics.tensorboard import TensorBoard


class Reporter:
    """Sends every event to every sink. It has no sinks on ranks other than 0, so callers need not check the rank."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(cls, config: TrainConfig, is_main: bool, total_steps: int) -> Reporter:
        """Open the configured sinks; raise UserError if one cannot be opened."""
        if not is_main:
            return cls([])
        folder, metrics = run_folder(config), config.metrics
        sinks: list[Sink] = [open_console(metrics.progress, total_steps)]
        try:
            if metrics.jsonl:
                sinks.append(JsonLines(folder / "metrics.jsonl"))
            if metrics.tensorboard:
                sinks.append(TensorBoard(folder / "tensorboard"))
            if metrics.prometheus_port is not None:
                sinks.append(Prometheus(metrics.prometheus_host, metrics.prometheus_port, config.train.run))
        except OSError as error:
            raise UserError(
                f"metrics cannot be opened: {error}. Fix: choose another --metrics.dir or --metrics.prometheus-port"
            ) from None
        return cls(sinks)

    def event(self, name: str, **fields: Any) -> None:
        """Send the event `name` with its fields to all sinks."""
        for sink in self._sinks:
            sink.event(name, fields)

    def set_step(self, step: int) -> None:
        """Show that `step` steps are done."""
        for sink in self._sinks:
            sink.set_step(step)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


def run_folder(config: TrainConfig) -> Path:
    """Return the folder of a run's logs: metrics.dir, else a local checkpoint.uri, else runs; then the run's name."""
    root = config.metrics.dir or (config.checkpoint.uri if is_local(config.checkpoint.uri) else "runs")
    return Path(run_uri(root.removeprefix("file://"), config.train.run))
