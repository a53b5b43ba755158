"""Scalars for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from trainer.metrics.append_log import AppendLog
from trainer.metrics.sink import Sink

#: Fields of train and eval events that become scalars over steps.
SCALARS = ("loss", "ne", "auc", "calibration", "samples_per_second", "step_ms", "learning_rate_factor", "memory_gib")


class TensorBoard(Sink):
    """Scalars of training and evaluation, in TensorBoard's event file format.

    torch's SummaryWriter is not used: a full disk ends its thread with a traceback, and the next scalar raises.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._writer = RecordWriter(AppendLog(folder / name))
        self._write(file_version="brain.Event:2")

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Write the scalars of a train or eval event."""
        if name in ("train", "eval"):
            values = [self._summary.Value(tag=f"{name}/{k}", simple_value=fields[k]) for k in SCALARS if k in fields]
            self._write(step=fields["step"], summary=self._summary(value=values))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _write(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
