"""The newest numbers of a run: from the trainer's Prometheus endpoint, else from the last lines of its log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from infra.kube_api import KubeApi, KubeApiError, Object, api_path
from workloads.facts import METRICS_PORT

GIB = 1024**3
#: One series of the text format: name, labels, value.
_SERIES = re.compile(r"^(trainer_\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Series without a split, by the key that they become, and the factor.
_PLAIN = {
    "trainer_step": ("step", 1.0),
    "trainer_position_samples": ("position", 1.0),
    "trainer_samples_per_second": ("samples_per_second", 1.0),
    "trainer_step_seconds": ("step_ms", 1e3),
    "trainer_memory_bytes": ("memory_gib", 1 / GIB),
}
_BY_SPLIT = {"trainer_loss": "loss", "trainer_ne": "ne", "trainer_auc": "auc", "trainer_calibration": "calibration"}
_SAVED = "trainer_last_checkpoint_timestamp_seconds"
_KEYS = ("step", "position", "samples_per_second", "step_ms", "memory_gib", *_BY_SPLIT.values())
#: Enough lines for the last report, the last save and the last evaluation.
_TAIL_LINES = 200


def newest(api: KubeApi, namespace: str, pods: Sequence[Object]) -> dict[str, Any]:
    """The numbers, and under `source` where they come from; empty where neither endpoint nor log has any.

    Rank 0 alone answers and writes, and may be on any pod of an elastic job, so each is asked in turn.
    """
    started = [str(pod["metadata"]["name"]) for pod in pods if (pod.get("status") or {}).get("phase") != "Pending"]
    running = [str(pod["metadata"]["name"]) for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    for name in running:
        try:
            found = parse_series(api.text(f"{api_path(namespace, 'Pod', name)}:{METRICS_PORT}/proxy/metrics"))
        except KubeApiError:  # this pod is not rank 0, or no proxy is allowed: the log is left
            continue
        if found:
            return found | {"source": f"pod {name}, port {METRICS_PORT}"}
    for name in started:
        try:
            text = api.text(f"{api_path(namespace, 'Pod', name)}/log", tailLines=str(_TAIL_LINES))
        except KubeApiError:  # the container has not started, or its log is gone
            continue
        found = parse_log(text.splitlines())
        if found:
            return found | {"source": f"log of pod {name}"}
    return {}


def parse_series(text: str) -> dict[str, Any]:
    """Prometheus's text format -> the trainer's numbers in the units of its events."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = _SERIES.match(line.strip())
        if not match:
            continue
        name, labels, value = match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])
        if name in _PLAIN:
            key, factor = _PLAIN[name]
            found[key] = int(value) if key in ("step", "position") else value * factor
        elif name in _BY_SPLIT:
            prefix = "" if labels.get("split") == "train" else f"{labels.get('split')}_"
            found[prefix + _BY_SPLIT[name]] = value
        elif name == _SAVED and value:
            found["checkpoint_time"] = datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
    return found


def parse_log(lines: Iterable[str]) -> dict[str, Any]:
    """The trainer's JSON lines -> the same; other lines are passed over."""
    found: dict[str, Any] = {}
    for line in lines:
        event = as_event(line)
        if event is None:
            continue
        kind = event["event"]
        if kind in ("train", "resume", "result"):
            found |= {key: event[key] for key in _KEYS if event.get(key) is not None}
        elif kind == "eval":
            found |= {f"eval_{key}": event[key] for key in _BY_SPLIT.values() if event.get(key) is not None}
        elif kind == "start":
            found["total_steps"] = event.get("total_steps")
        if kind == "checkpoint":
            found |= {"checkpoint": event.get("path"), "checkpoint_step": event.get("step")}
            found["checkpoint_time"] = datetime.fromtimestamp(event["time"], UTC).isoformat(timespec="seconds")
        elif kind == "result":
            found |= {"state": event.get("state"), "checkpoint": event.get("checkpoint")}
    return found


def as_event(line: str) -> Mapping[str, Any] | None:
    """A line of the trainer as its event; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "time"} <= event.keys() else None
