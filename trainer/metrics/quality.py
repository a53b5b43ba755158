"""Normalised entropy, AUC and calibration over all processes, by TorchRec's RecMetrics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.metrics.metric_module import RecMetricModule, generate_metric_module
from torchrec.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo

from trainer.runtime.process_group import Runtime

_TASK = RecTaskInfo(name="click", label_name="label", prediction_name="prediction", weight_name="weight")
_NAMES = {"window_ne": "ne", "window_auc": "auc", "window_calibration": "calibration"}


class Quality:
    """Metrics of the last `window` samples of the whole job, updated with at most `piece` samples per process at once.

    NE is the log loss divided by the entropy of the base rate (He et al. 2014). Calibration is predicted divided by
    observed positives.
    """

    def __init__(self, runtime: Runtime, window: int, piece: int) -> None:
        kinds = (RecMetricEnum.NE, RecMetricEnum.AUC, RecMetricEnum.CALIBRATION)
        window = max(window, (piece + 1) * runtime.world_size)
        self._piece = piece
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._module = generate_metric_module(
            RecMetricModule,
            MetricsConfig(
                rec_tasks=[_TASK],
                rec_metrics={kind: RecMetricDef(rec_tasks=[_TASK], window_size=window) for kind in kinds},
                throughput_metric=None,
                state_metrics=[],
                compute_on_all_ranks=True,
            ),
            batch_size=piece,
            world_size=runtime.world_size,
            my_rank=runtime.rank,
            state_metrics_mapping={},
            device=runtime.device,
            process_group=dist.group.WORLD,
        )

    def add(self, logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> None:
        """Add a batch, without waiting for the device."""
        if sum(t.numel() for t in self._logits) + logits_B.numel() > self._piece:
            self._flush()
        self._logits.append(logits_B)
        self._labels.append(labels_B)
        self._weights.append(torch.ones_like(labels_B) if weights_B is None else weights_B)

    def compute(self) -> dict[str, float]:
        """Return `ne`, `auc` and `calibration` of the window, NaN if it holds one class only. Collective."""
        self._flush()
        result = self._module.compute()
        values = dict(result.resolve() if hasattr(result, "resolve") else result)
        return {
            _NAMES[key.partition("|")[2]]: float(value)
            for key, value in values.items()
            if key.partition("|")[2] in _NAMES
        }

    def _flush(self) -> None:
        if self._logits:
            prediction = torch.sigmoid(torch.cat(self._logits)).double()
            self._module.update(
                {"prediction": prediction, "label": torch.cat(self._labels), "weight": torch.cat(self._weights)}
            )
            self._logits, self._labels, self._weights = [], [], []
