"""Metrics for Prometheus, served over HTTP by rank 0."""

from __future__ import annotations

from typing import Any

from trainer.metrics.sink import Sink

_GIB = 1024**3


class Prometheus(Sink):
    """The endpoint /metrics of rank 0, in base units; every series has the label `run`.

    With the label `split` (train, eval): trainer_loss, trainer_ne, trainer_auc, trainer_calibration.
    Of training: trainer_samples_per_second, trainer_step_seconds, trainer_memory_bytes, trainer_learning_rate_factor,
    trainer_step, trainer_position_samples, trainer_last_checkpoint_timestamp_seconds, trainer_restarts (of the
    processes, by torchrun), and the counters trainer_samples_total and trainer_checkpoint_failures_total.
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
        self._failures.labels(run)  # start at 0, so that increase() counts the first failure
        self._samples = Counter("trainer_samples", "samples trained on by this process", ["run"], registry=registry)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Update the metrics that the event changes."""
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
        """Stop the HTTP server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
