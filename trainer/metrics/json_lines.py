"""Events as JSON lines: metrics.jsonl, and the console without a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer.metrics.append_log import AppendLog
from trainer.metrics.sink import Sink
from trainer.sharding.planner import PlannedTable


class JsonLines(Sink):
    """One JSON object per line, to a file or to standard output."""

    def __init__(self, path: Path | None) -> None:
        self._log = None if path is None else AppendLog(path)
        if self._log is not None and path is not None and _ends_mid_line(path):
            self._log.write(b"\n")  # otherwise the first event would join a line cut off by a kill or a full disk

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Write one line; NaN and infinity become null because JSON has neither."""
        values = {"event": name, "time": round(time.time(), 3)} | {
            key: _to_json(value) for key, value in fields.items()
        }
        line = json.dumps(values) + "\n"
        if self._log is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            self._log.write(line.encode())

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if self._log is not None:
            self._log.close()


def _ends_mid_line(path: Path) -> bool:
    """Return whether a file's last line has no newline."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"


def _to_json(value: Any) -> Any:
    """Return `value` in a form that json.dumps accepts."""
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
