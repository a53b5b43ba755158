"""Charts that make a pool's GPUs schedulable and export their metrics: pure functions that return chart values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.contract import ChartRequest, GpuPool, Toleration

#: The operator's RuntimeClass (operator.runtimeClass in the values of its chart).
_RUNTIME_CLASS = "nvidia"

#: Replaces the exporter's default list, which lacks throttling and NVLink.
COUNTERS = Path(__file__).resolve().parents[1] / "monitoring" / "counters.csv"


def _tolerations(tolerations: Sequence[Toleration]) -> list[dict[str, str]]:
    return [toleration.manifest for toleration in tolerations]


def device_plugin(tolerations: Sequence[Toleration]) -> ChartRequest:
    """Return the NVIDIA device plugin, for nodes that have the driver but do not advertise GPUs.

    The chart's affinity requires the label of every GPU pool of this project. Its default tolerations cover only
    nvidia.com/gpu, so the other taints of a spot pool are added.
    """
    return ChartRequest("nvidia-device-plugin", {"tolerations": _tolerations(tolerations)})


def gpu_operator(
    tolerations: Sequence[Toleration], *, installs_driver: bool, finds_features: bool, rdma: bool
) -> ChartRequest:
    """Return the GPU operator; with `installs_driver` False the node image has driver and container toolkit.

    Set `finds_features` to False where another operator runs Node Feature Discovery, because two instances conflict.
    The operator's DCGM exporter stays off: the `dcgm-exporter` chart serves all clusters alike.
    """
    values: dict[str, object] = {
        "daemonsets": {"tolerations": _tolerations(tolerations)},
        "dcgmExporter": {"enabled": False},
        "driver": {"enabled": installs_driver, "rdma": {"enabled": rdma and installs_driver}},
        "nfd": {"enabled": finds_features},
        "toolkit": {"enabled": installs_driver},
    }
    if finds_features:
        # The chart's default covers nvidia.com/gpu only: GPUs of nodes with another taint would never be detected.
        values["node-feature-discovery"] = {"worker": {"tolerations": _tolerations(tolerations)}}
    return ChartRequest("gpu-operator", values, runtime_class=_RUNTIME_CLASS if installs_driver else None)


def dcgm_exporter(pool: GpuPool) -> ChartRequest:
    """Return the exporter of this pool's GPU metrics, which the Prometheus of the stack discovers.

    It requests no GPU. Where the GPU operator configures containerd, only its RuntimeClass gives such a pod the driver:
    with CDI the NVIDIA runtime is not the default (gpu-operator, transformToolkitCtrForCDI; dcgm-exporter#612).
    """
    values: dict[str, object] = {
        "nodeSelector": dict(pool.node_selector),
        "tolerations": _tolerations(pool.tolerations),
        "serviceMonitor": {"enabled": True, "interval": "15s"},
        "kubernetes": {"enablePodLabels": True},
        "customMetrics": COUNTERS.read_text(encoding="utf-8"),
    }
    if pool.chart and pool.chart.runtime_class:
        values["runtimeClassName"] = pool.chart.runtime_class
    return ChartRequest("dcgm-exporter", values)
