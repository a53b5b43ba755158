"""The alerts: condition, duration, meaning and action of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Groups by run, because rank 0 of an elastic job can move between pods.
_RUN = "by (namespace, run)"
_RATE = f"sum {_RUN} (trainer_samples_per_second)"
#: Nodes that run a training pod.
_TRAINS = (
    'max by (node) (kube_pod_container_info{container="trainer"} * on (namespace, pod) group_left (node) kube_pod_info)'
)


@dataclass(frozen=True)
class Alert:
    """One alert, which fires when `query` has had a result for `minutes`."""

    name: str
    query: str
    minutes: int
    severity: Literal["warning", "critical"]
    summary: str
    action: str


ALERTS = (
    Alert(
        "TrainingMakesNoProgress",
        # The metric must have existed ten minutes ago: a new pod has no changes yet either.
        f"max {_RUN} (changes(trainer_step[10m])) == 0 and max {_RUN} (trainer_step offset 10m)",
        1,
        "critical",
        "run {{ $labels.run }} has made no step for 10 minutes",
        "python -m infra doctor --stack <stack>; fault.step_timeout_seconds stops a hang",
    ),
    Alert(
        "TrainingThroughputHalved",
        f"{_RATE} < 0.5 * quantile_over_time(0.5, ({_RATE})[2h:1m])",
        10,
        "warning",
        "run {{ $labels.run }} has less than half of its median throughput of the last two hours",
        "check the fabric, throttling and utilisation panels: one slow GPU or node slows down all",
    ),
    Alert(
        "CheckpointTooOld",
        f"time() - max {_RUN} (trainer_last_checkpoint_timestamp_seconds) > 3600",
        5,
        "critical",
        "the newest checkpoint of run {{ $labels.run }} is {{ $value | humanizeDuration }} old",
        "python -m workloads logs --stack <stack>: events checkpoint_failed name the reason",
    ),
    Alert(
        "NoCheckpointYet",
        f"max {_RUN} (trainer_step) unless max {_RUN} (trainer_last_checkpoint_timestamp_seconds)",
        60,
        "warning",
        "run {{ $labels.run }} has trained for an hour and saved nothing",
        "set trainer.checkpoint.every_minutes, and search the log for checkpoint_failed",
    ),
    Alert(
        "CheckpointsFail",
        f"sum {_RUN} (increase(trainer_checkpoint_failures_total[30m])) > 0",
        0,
        "warning",
        "a checkpoint of run {{ $labels.run }} was not saved",
        "it is retried; checkpoint.max_failures in a row stop the run",
    ),
    Alert(
        "GpuError",
        "max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS > 0 and changes(DCGM_FI_DEV_XID_ERRORS[15m]) > 0)",
        0,
        "critical",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reports XID {{ $value }}",
        "look it up in NVIDIA's XID catalogue; 48, 63, 64, 74, 79, 94, 95: drain the node, and the pool replaces it",
    ),
    Alert(
        "GpuMemoryFails",
        "max by (Hostname, gpu) (DCGM_FI_DEV_ROW_REMAP_FAILURE) > 0",
        0,
        "critical",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} has no spare rows left",
        "drain the node: the GPU must be replaced",
    ),
    Alert(
        "GpuThrottled",
        "max by (Hostname, gpu) (rate(DCGM_FI_DEV_THERMAL_VIOLATION[5m])) / 1e9 > 0.1",
        10,
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} is throttled by heat",
        "drain the node: a GPU in a data centre should not overheat",
    ),
    Alert(
        "TrainingNodeIsTakenAway",
        f"(max by (node) (kube_node_spec_unschedulable) == 1 or max by (node) "
        f'(kube_node_status_condition{{condition="Ready", status!="true"}}) == 1) and on (node) {_TRAINS}',
        0,
        "warning",
        "node {{ $labels.node }} with a training pod is leaving: a spot interruption, or an upgrade",
        "the trainer saves and continues on the remaining nodes; python -m workloads status --stack <stack>",
    ),
)


def rules() -> dict[str, object]:
    """Return the `spec` of a PrometheusRule, which is also a valid rules file for Prometheus."""
    return {"groups": [{"name": "torchrec-training", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, object]:
    duration: dict[str, object] = {"for": f"{alert.minutes}m"} if alert.minutes else {}
    return {
        "alert": alert.name,
        "expr": alert.query,
        **duration,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.action},
    }
