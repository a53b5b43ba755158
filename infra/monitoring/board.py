"""The dashboard: rows of panels with their queries, rendered as Grafana's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The PodMonitor adds `namespace` and `pod` to the trainer's series; the trainer adds `run`.
_RUN = '{namespace=~"$namespace", run=~"$run"}'
_TRAIN = '{namespace=~"$namespace", run=~"$run", split="train"}'
_EVAL = '{namespace=~"$namespace", run=~"$run", split="eval"}'
_CONTAINER = '{namespace=~"$namespace", container="trainer"}'
#: The node's network cards, without loopback and the interfaces of pods.
_CARDS = '{device!~"lo|veth.*|cali.*|eni.*"}'
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _traffic(counter: str) -> str:
    """Return the query for bytes per second of each node."""
    return f"sum by (instance) (rate({counter}[5m]))"


@dataclass(frozen=True)
class Panel:
    """A graph: its queries by legend, the unit in Grafana's naming, and a description that explains how to read it."""

    title: str
    queries: Mapping[str, str]
    unit: str
    description: str


TRAINING = (
    Panel(
        "Samples per second",
        {"{{run}}": f"sum by (run) (trainer_samples_per_second{_RUN})"},
        "short",
        "Of the whole job. A lasting drop means that a node, the network or a disk became slow.",
    ),
    Panel(
        "Loss",
        {"train": f"trainer_loss{_TRAIN}", "held out": f"trainer_loss{_EVAL}"},
        "none",
        "Held-out loss that rises above training loss: the model overfits.",
    ),
    Panel(
        "Normalised entropy",
        {"train": f"trainer_ne{_TRAIN}", "held out": f"trainer_ne{_EVAL}"},
        "none",
        "Log loss divided by the log loss of always predicting the base rate: 1 has learnt nothing, less is better.",
    ),
    Panel(
        "AUC and calibration",
        {
            "AUC train": f"trainer_auc{_TRAIN}",
            "AUC held out": f"trainer_auc{_EVAL}",
            "calibration": f"trainer_calibration{_TRAIN}",
        },
        "none",
        "Calibration is predicted divided by observed clicks: 1 is ideal.",
    ),
    Panel(
        "Step time",
        {"{{run}}": f"trainer_step_seconds{_RUN}"},
        "s",
        "Seconds of one optimizer step on the slowest rank, for which all others wait.",
    ),
    Panel(
        "Age of the newest checkpoint",
        {"{{run}}": f"time() - trainer_last_checkpoint_timestamp_seconds{_RUN}"},
        "s",
        "Training time that a failure would lose: a sawtooth with the period checkpoint.every_minutes.",
    ),
    Panel(
        "Samples consumed",
        {"{{run}}": f"trainer_position_samples{_RUN}"},
        "short",
        "A drop is a resume from a checkpoint; its height is the number of samples to repeat.",
    ),
    Panel(
        "Restarts",
        {
            "processes": f"trainer_restarts{_RUN}",
            "containers {{pod}}": f"kube_pod_container_status_restarts_total{_CONTAINER}",
        },
        "short",
        "torchrun restarts processes in a pod, Kubernetes restarts containers.",
    ),
    Panel(
        "Failed saves",
        {"{{run}}": f"increase(trainer_checkpoint_failures_total{_RUN}[1h])"},
        "short",
        "In the last hour. checkpoint.max_failures in a row stop the run.",
    ),
)

GPUS = (
    Panel(
        "Utilisation",
        {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_GPU_UTIL"},
        "percent",
        "The share of time in which a kernel runs. A GPU below the others slows them down.",
    ),
    Panel(
        "Memory used",
        {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)"},
        "percentunit",
        "Differences between GPUs: the sharding plan puts larger tables on some.",
    ),
    Panel(
        "Tensor cores and memory interface",
        {"tensor cores": "avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)", "HBM": "avg(DCGM_FI_PROF_DRAM_ACTIVE)"},
        "percentunit",
        "HBM and the network limit a recommender; busy tensor cores mean a large dense part.",
    ),
    Panel(
        "NVLink and PCIe",
        {
            "NVLink {{Hostname}}": "sum by (Hostname) (DCGM_FI_PROF_NVLINK_TX_BYTES + DCGM_FI_PROF_NVLINK_RX_BYTES)",
            "PCIe {{Hostname}}": "sum by (Hostname) (DCGM_FI_PROF_PCIE_TX_BYTES + DCGM_FI_PROF_PCIE_RX_BYTES)",
        },
        "Bps",
        "Within a node. PCIe traffic as high as the fabric's: NCCL copies through host memory.",
    ),
    Panel(
        "Fabric between nodes",
        {
            "InfiniBand sent {{instance}}": _traffic("node_infiniband_port_data_transmitted_bytes_total"),
            "InfiniBand received {{instance}}": _traffic("node_infiniband_port_data_received_bytes_total"),
            "Ethernet sent {{instance}}": _traffic(f"node_network_transmit_bytes_total{_CARDS}"),
            "Ethernet received {{instance}}": _traffic(f"node_network_receive_bytes_total{_CARDS}"),
        },
        "Bps",
        "Training traffic on Ethernet although the node has a fabric: NCCL fell back to TCP.",
    ),
    Panel(
        "Throttling",
        {
            "heat {{Hostname}} {{gpu}}": "rate(DCGM_FI_DEV_THERMAL_VIOLATION[5m]) / 1e9",
            "power {{Hostname}} {{gpu}}": "rate(DCGM_FI_DEV_POWER_VIOLATION[5m]) / 1e9",
        },
        "percentunit",
        "The share of time in which the GPU is throttled.",
    ),
    Panel(
        "XID errors",
        {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_XID_ERRORS"},
        "none",
        "The last error code: NVIDIA's XID catalogue explains it. 79 is a GPU that fell off the bus.",
    ),
    Panel(
        "Temperature and power",
        {"{{Hostname}} {{gpu}}": "DCGM_FI_DEV_GPU_TEMP", "W {{Hostname}} {{gpu}}": "DCGM_FI_DEV_POWER_USAGE"},
        "none",
        "Degrees Celsius, watts.",
    ),
    Panel(
        "Pods by phase",
        {"{{phase}}": 'sum by (phase) (kube_pod_status_phase{namespace=~"$namespace"})'},
        "short",
        "If pods stay pending, python -m infra doctor shows why.",
    ),
)
ROWS = {"Training": TRAINING, "GPUs and nodes": GPUS}


def dashboard() -> dict[str, object]:
    """Return the document that Grafana's sidecar, or its import page, reads."""
    panels: list[dict[str, object]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": _WIDTH * _COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for index, panel in enumerate(row):
            panels.append(_graph(panel, len(panels) + 1, index, top + 1))
        top += 1 + -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "torchrec-training",
        "title": "TorchRec training",
        "tags": ["torchrec"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "panels": panels,
    }


def _graph(panel: Panel, number: int, index: int, top: int) -> dict[str, object]:
    place = {"x": index % _COLUMNS * _WIDTH, "y": top + index // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    targets = [
        {"refId": chr(ord("A") + position), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
        for position, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def _variables() -> Sequence[dict[str, object]]:
    """Return the variables that the user selects at the top: data source, namespace and run."""
    query: dict[str, object] = {
        "type": "query",
        "datasource": _SOURCE,
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }
    return (
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        query | {"name": "namespace", "label": "Namespace", "query": "label_values(kube_pod_info, namespace)"},
        query | {"name": "run", "label": "Run", "query": 'label_values(trainer_step{namespace=~"$namespace"}, run)'},
    )
