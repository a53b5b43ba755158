"""Where events go: a progress bar or JSON lines for the console, metrics.jsonl, TensorBoard and Prometheus."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from trainer.checkpoint.store import is_local, join_uri
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.metrics.append_log import AppendedFile
from trainer.sharding.planner import PlannedTable

_MIB, _GIB = 1024**2, 1024**3
# Scalars that a dashboard draws over steps; the rest of an event is context.
SCALARS = ("loss", "ne", "auc", "calibration", "samples_per_second", "step_ms", "learning_rate_factor", "memory_gib")


class Sink:
    """One place that events go to; what a sink does not override, it does not care about."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Take one event: start, plan, resume, train, eval, checkpoint, result."""

    def tick(self, step: int) -> None:
        """Take note that `step` steps are done; called every step, so it must cost nothing."""

    def close(self) -> None:
        """Flush and let go."""


class Reporter:
    """Sends every event to every sink. On other processes than rank 0 it has none, so callers need not ask."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(cls, config: TrainConfig, is_main: bool, total_steps: int) -> Reporter:
        """The sinks that the configuration asks for; raises UserError where one cannot be opened."""
        if not is_main:
            return cls([])
        folder = run_folder(config)
        sinks: list[Sink] = [_console(config, total_steps)]
        try:
            if config.metrics.jsonl:
                sinks.append(JsonLines(folder / "metrics.jsonl"))
            if config.metrics.tensorboard:
                sinks.append(TensorBoard(folder / "tensorboard"))
            if config.metrics.prometheus_port is not None:
                sinks.append(
                    Prometheus(config.metrics.prometheus_host, config.metrics.prometheus_port, config.train.run)
                )
        except OSError as error:
            raise UserError(
                f"metrics cannot be opened: {error}; choose another --metrics.dir or --metrics.prometheus-port"
            ) from None
        return cls(sinks)

    def event(self, name: str, **fields: Any) -> None:
        """Report `name` with its fields to all sinks."""
        for sink in self._sinks:
            sink.event(name, fields)

    def tick(self, step: int) -> None:
        """`step` steps are done."""
        for sink in self._sinks:
            sink.tick(step)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


def run_folder(config: TrainConfig) -> Path:
    """The folder of a run's logs: metrics.dir, else checkpoint.uri where that is local, else runs; then the run's
    name."""
    root = config.metrics.dir or (config.checkpoint.uri if is_local(config.checkpoint.uri) else "runs")
    return Path(join_uri(root.removeprefix("file://"), config.train.run))


def _console(config: TrainConfig, total_steps: int) -> Sink:
    kind = config.metrics.progress
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "lines"
    if kind == "none":
        return NoProgress()
    return ProgressBar(total_steps) if kind == "bar" else JsonLines(None)


class JsonLines(Sink):
    """One JSON object per line, to a file or to standard output."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else AppendedFile(path)
        if self._file is not None and path is not None and _is_torn(path):
            self._file.write(b"\n")  # or the first event would be lost with what a kill or a full disk cut off

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """See Sink. NaN and infinity become null: they are not JSON."""
        values = {"event": name, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in fields.items()}
        line = json.dumps(values) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            self._file.write(line.encode())

    def close(self) -> None:
        """See Sink."""
        if self._file is not None:
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"


class ProgressBar(Sink):
    """A bar, notes above it, and tables for the plan and the result."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._total = total_steps
        self._task: TaskID | None = None

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """See Sink."""
        if name == "plan":
            self._console.print(plan_table(fields["tables"]))
        elif name == "result":
            self._bar.stop()
            self._console.print(result_table(fields))
        elif name == "train":
            self._describe(fields)
        else:
            text = "  ".join(f"{key} {_short(value)}" for key, value in fields.items())
            self._console.print(f"[bold]{name}[/bold]  {text}", soft_wrap=True)

    def close(self) -> None:
        """See Sink."""
        self._bar.stop()

    def tick(self, step: int) -> None:
        """See Sink."""
        self._bar.update(self._training(), completed=step)

    def _describe(self, fields: dict[str, Any]) -> None:
        info = f"loss {fields['loss']:.4f}" + (f"  auc {fields['auc']:.4f}" if "auc" in fields else "")
        self._bar.update(self._training(), info=f"{info}  {fields['samples_per_second']:,.0f} samples/s")

    def _training(self) -> TaskID:
        """The bar, drawn from the first step on."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._total, info="")
        return self._task


class NoProgress(Sink):
    """Only the result, as a table."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """See Sink."""
        if name == "result":
            Console().print(result_table(fields))


class TensorBoard(Sink):
    """Scalars of training and evaluation under the run's folder, in a file of TensorBoard's own format.

    torch's SummaryWriter writes in a thread that a full disk ends, with a trace, and raises at the next scalar.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._writer = RecordWriter(AppendedFile(folder / name))
        self._write(file_version="brain.Event:2")

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """See Sink."""
        if name in ("train", "eval"):
            values = [self._summary.Value(tag=f"{name}/{k}", simple_value=fields[k]) for k in SCALARS if k in fields]
            self._write(step=fields["step"], summary=self._summary(value=values))

    def close(self) -> None:
        """See Sink."""
        self._writer.close()

    def _write(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())


class Prometheus(Sink):
    """The endpoint /metrics of rank 0, in base units, each series with the label `run`.

    By split (train, eval): trainer_loss, trainer_ne, trainer_auc, trainer_calibration. Of training:
    trainer_samples_per_second, trainer_step_seconds, trainer_memory_bytes, trainer_learning_rate_factor, trainer_step,
    trainer_position_samples, trainer_last_checkpoint_timestamp_seconds, trainer_restarts (of the processes, by
    torchrun), and the counters trainer_samples_total and trainer_checkpoint_failures_total.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"trainer_{name}", text, ["run", *labels], registry=registry)

        self._run = run
        self._quality = {
            "loss": gauge("loss", "mean binary cross-entropy", "split"),
            "ne": gauge("ne", "normalised entropy", "split"),
            "auc": gauge("auc", "area under the ROC curve", "split"),
            "calibration": gauge("calibration", "predicted over observed positives", "split"),
        }
        self._scaled = {
            "samples_per_second": (1.0, gauge("samples_per_second", "samples per second of the whole job")),
            "step_ms": (1e-3, gauge("step_seconds", "seconds per optimizer step")),
            "memory_gib": (float(_GIB), gauge("memory_bytes", "largest memory of rank 0 so far")),
            "learning_rate_factor": (1.0, gauge("learning_rate_factor", "factor of the schedule")),
            "step": (1.0, gauge("step", "optimizer steps done")),
            "position": (1.0, gauge("position_samples", "samples of the stream consumed")),
        }
        self._checkpoint = gauge("last_checkpoint_timestamp_seconds", "when the newest checkpoint became complete")
        self._restarts = gauge("restarts", "how often torchrun has restarted the processes")
        self._failures = Counter("trainer_checkpoint_failures", "saves that have failed", ["run"], registry=registry)
        self._failures.labels(run)  # 0 from the start, so that the first one is an increase
        self._samples = Counter("trainer_samples", "samples trained on by this process", ["run"], registry=registry)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """See Sink."""
        if name in ("train", "eval"):
            for key, gauge in self._quality.items():
                if key in fields:
                    gauge.labels(self._run, name).set(fields[key])
        if name == "train":
            self._samples.labels(self._run).inc(fields["samples_since_last"])
        if name == "start":
            self._restarts.labels(self._run).set(fields["restart"])
        if name == "checkpoint_failed":
            self._failures.labels(self._run).inc()
        if name == "checkpoint":
            self._checkpoint.labels(self._run).set_to_current_time()
        if name in ("train", "resume"):
            for key, (scale, gauge) in self._scaled.items():
                if key in fields:
                    gauge.labels(self._run).set(fields[key] * scale)

    def close(self) -> None:
        """See Sink."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def plan_table(tables: list[PlannedTable]) -> Table:
    """The sharding plan for people, with the bytes of fp32 weights per rank."""
    table = Table(title="Sharding plan")
    for column in ("table", "rows x columns", "sharding", "kernel", "ranks"):
        table.add_column(column)
    totals: dict[int, int] = {}
    for planned in tables:
        ranks = ", ".join(map(str, planned.ranks)) if len(planned.ranks) <= 8 else f"{len(planned.ranks)} ranks"
        table.add_row(planned.table, f"{planned.rows:,} x {planned.dim}", planned.sharding, planned.kernel, ranks)
        for rank, size in planned.bytes_per_rank.items():
            totals[rank] = totals.get(rank, 0) + size
    table.caption = "weights per rank: " + ", ".join(
        f"{rank}: {size / _MIB:,.1f} MiB" for rank, size in sorted(totals.items())
    )
    return table


def result_table(fields: dict[str, Any]) -> Table:
    """The end of a run for people."""
    table = Table(title=f"Run {fields['run']}", show_header=False)
    rows = [
        ("state", fields["state"]),
        ("loss (held out)", _short(fields.get("loss"))),
        ("NE", _short(fields.get("ne"))),
        ("AUC", _short(fields.get("auc"))),
        ("best possible AUC of this data", _short(fields.get("best_auc"))),
        ("calibration", _short(fields.get("calibration"))),
        ("samples/s of the whole job", _short(fields.get("samples_per_second"))),
        ("steps", f"{fields['step']:,}"),
        ("samples", f"{fields['position']:,}"),
        ("peak memory of rank 0 (GiB)", _short(fields.get("memory_gib"))),
        ("processes", str(fields["world_size"])),
        ("checkpoint", str(fields.get("checkpoint"))),
        ("logs", str(fields.get("logs"))),
    ]
    for name, value in rows:
        table.add_row(name, value, style="bold" if name == "AUC" else None)
    return table


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4f}"
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list) and value and isinstance(value[0], PlannedTable):
        return [
            {
                "table": t.table,
                "rows": t.rows,
                "dim": t.dim,
                "sharding": t.sharding,
                "kernel": t.kernel,
                "bytes_per_rank": {str(r): b for r, b in t.bytes_per_rank.items()},
            }
            for t in value
        ]
    return value
