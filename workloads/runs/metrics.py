"""The newest metrics of a run, from the trainer's Prometheus endpoint or the last lines of its log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from infra.kube_api import KubeApi, KubeApiError, Object, api_path
from workloads.facts import METRICS_PORT

GIB = 1024**3
#: One sample of Prometheus's text format: name, labels, value.
_SERIES = re.compile(r"^(trainer_\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Series without a label `split`: the key for each, and the factor to its unit.
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
#: Enough lines for the last report, the last checkpoint and the last evaluation.
_TAIL_LINES = 200


def newest_metrics(api: KubeApi, namespace: str, pods: Sequence[Object]) -> dict[str, Any]:
    """Return the newest metrics and, as `source`, their origin; empty if there are none yet.

    Only rank 0 reports, and it may be on any pod of an elastic job, so every pod is tried.
    """
    started = [str(pod["metadata"]["name"]) for pod in pods if (pod.get("status") or {}).get("phase") != "Pending"]
    running = [str(pod["metadata"]["name"]) for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    for name in running:
        try:
            found = parse_prometheus(api.text(f"{api_path(namespace, 'Pod', name)}:{METRICS_PORT}/proxy/metrics"))
        except KubeApiError:  # not rank 0, or the proxy is forbidden: the log is next
            continue
        if found:
            return found | {"source": f"pod {name}, port {METRICS_PORT}"}
    for name in started:
        try:
            text = api.text(f"{api_path(namespace, 'Pod', name)}/log", tailLines=str(_TAIL_LINES))
        except KubeApiError:  # the container has not started, or its log was deleted
            continue
        found = parse_log(text.splitlines())
        if found:
            return found | {"source": f"log of pod {name}"}
    return {}


def parse_prometheus(text: str) -> dict[str, Any]:
    """Return the trainer's metrics from Prometheus's text format, in the units of the trainer's events."""
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
    """Return the trainer's metrics from the JSON lines of its log; other lines are ignored."""
    found: dict[str, Any] = {}
    for line in lines:
        event = parse_event(line)
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


def parse_event(line: str) -> Mapping[str, Any] | None:
    """Return the event of a JSON line of the trainer, None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "time"} <= event.keys() else None
