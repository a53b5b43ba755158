"""The alerts: what must be true for how long, what it means, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A run is one series whatever pod of an elastic job has rank 0 at the time.
_RUN = "by (namespace, run)"
_RATE = f"sum {_RUN} (trainer_samples_per_second)"
#: Nodes that run a pod of a job.
_TRAINS = (
    'max by (node) (kube_pod_container_info{container="trainer"} * on (namespace, pod) group_left (node) kube_pod_info)'
)


@dataclass(frozen=True)
class Alert:
    """One alert; `minutes` is how long `query` must have a result."""

    name: str
    query: str
    minutes: int
    severity: Literal["warning", "critical"]
    summary: str
    action: str


ALERTS = (
    Alert(
        "TrainingMakesNoProgress",
        # Only where it was there ten minutes ago: a pod that has just come has not changed yet either.
        f"max {_RUN} (changes(trainer_step[10m])) == 0 and max {_RUN} (trainer_step offset 10m)",
        1,
        "critical",
        "run {{ $labels.run }} has done no step for 10 minutes",
        "python -m infra doctor --stack <stack>; a hang ends by itself after fault.step_timeout_seconds",
    ),
    Alert(
        "TrainingThroughputHalved",
        f"{_RATE} < 0.5 * quantile_over_time(0.5, ({_RATE})[2h:1m])",
        10,
        "warning",
        "run {{ $labels.run }} does less than half of what it did in the last two hours",
        "look at the fabric, throttling and utilisation panels: one slow GPU or node holds up all",
    ),
    Alert(
        "CheckpointTooOld",
        f"time() - max {_RUN} (trainer_last_checkpoint_timestamp_seconds) > 3600",
        5,
        "critical",
        "the newest checkpoint of run {{ $labels.run }} is {{ $value | humanizeDuration }} old",
        "python -m workloads logs --stack <stack>: events checkpoint_failed say why",
    ),
    Alert(
        "NoCheckpointYet",
        f"max {_RUN} (trainer_step) unless max {_RUN} (trainer_last_checkpoint_timestamp_seconds)",
        60,
        "warning",
        "run {{ $labels.run }} has trained for an hour and saved nothing",
        "set trainer.checkpoint.every_minutes, and look for checkpoint_failed in the log",
    ),
    Alert(
        "CheckpointsFail",
        f"sum {_RUN} (increase(trainer_checkpoint_failures_total[30m])) > 0",
        0,
        "warning",
        "a save of run {{ $labels.run }} has failed",
        "it is tried again; checkpoint.max_failures in a row end the run",
    ),
    Alert(
        "GpuError",
        "max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS > 0 and changes(DCGM_FI_DEV_XID_ERRORS[15m]) > 0)",
        0,
        "critical",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reports XID {{ $value }}",
        "NVIDIA's XID catalogue; 48, 63, 64, 74, 79, 94, 95: drain the node and let the pool bring another",
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
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} is slowed down by heat",
        "drain the node: a data centre's GPU should not be",
    ),
    Alert(
        "TrainingNodeIsTakenAway",
        f"(max by (node) (kube_node_spec_unschedulable) == 1 or max by (node) "
        f'(kube_node_status_condition{{condition="Ready", status!="true"}}) == 1) and on (node) {_TRAINS}',
        0,
        "warning",
        "node {{ $labels.node }} with a training pod is leaving: a spot interruption, or an upgrade",
        "the trainer saves and goes on with what is left; python -m workloads status --stack <stack>",
    ),
)


def rules() -> dict[str, object]:
    """The `spec` of a PrometheusRule, which is also a file of rules for any Prometheus."""
    return {"groups": [{"name": "torchrec-training", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, object]:
    held: dict[str, object] = {"for": f"{alert.minutes}m"} if alert.minutes else {}
    return {
        "alert": alert.name,
        "expr": alert.query,
        **held,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.action},
    }
