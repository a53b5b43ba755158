"""What makes a pool's GPUs schedulable and measured; pure, from the contract's fields to chart values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.contract import ChartRequest, GpuPool, Toleration

#: Replaces the exporter's own list, which leaves throttling and NVLink out.
COUNTERS = Path(__file__).resolve().parents[1] / "monitoring" / "counters.csv"


def _tolerations(tolerations: Sequence[Toleration]) -> list[dict[str, str]]:
    return [toleration.manifest for toleration in tolerations]


def device_plugin(tolerations: Sequence[Toleration]) -> ChartRequest:
    """The NVIDIA device plugin, for nodes that have the driver but advertise no GPU.

    The chart's own affinity wants the label that every GPU pool here carries; its default tolerations cover only
    nvidia.com/gpu, so a spot pool's further taints are added.
    """
    return ChartRequest("nvidia-device-plugin", {"tolerations": _tolerations(tolerations)})


def gpu_operator(
    tolerations: Sequence[Toleration], *, installs_driver: bool, finds_features: bool, rdma: bool
) -> ChartRequest:
    """The GPU operator; `installs_driver` False leaves driver and container toolkit to the node image.

    `finds_features` False where another operator on the cluster runs Node Feature Discovery: two of them fight.
    Its DCGM exporter stays off: the `dcgm-exporter` chart serves every cluster in one way.
    """
    values: dict[str, object] = {
        "daemonsets": {"tolerations": _tolerations(tolerations)},
        "dcgmExporter": {"enabled": False},
        "driver": {"enabled": installs_driver, "rdma": {"enabled": rdma and installs_driver}},
        "nfd": {"enabled": finds_features},
        "toolkit": {"enabled": installs_driver},
    }
    if finds_features:
        # The chart's own list covers nvidia.com/gpu only: nodes with a further taint would never be found to have GPUs.
        values["node-feature-discovery"] = {"worker": {"tolerations": _tolerations(tolerations)}}
    return ChartRequest("gpu-operator", values)


def dcgm_exporter(pool: GpuPool) -> ChartRequest:
    """GPU metrics of this pool, found by every Prometheus that the stack's operator runs."""
    values: Mapping[str, object] = {
        "nodeSelector": dict(pool.node_selector),
        "tolerations": _tolerations(pool.tolerations),
        "serviceMonitor": {"enabled": True, "interval": "15s"},
        "kubernetes": {"enablePodLabels": True},
        "customMetrics": COUNTERS.read_text(encoding="utf-8"),
    }
    return ChartRequest("dcgm-exporter", values)
