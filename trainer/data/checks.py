"""Checks of values that would silently train a wrong model. Each error names the place of the value.

`where(i)` describes the place of the i-th value, such as "sample 17" or "row 17 of day_0_dense.npy".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.errors import UserError

Where = Callable[[int], str]


def check_ids(feature: str, rows: int, ids: Tensor, where: Where) -> None:
    """Raise UserError for an id outside 0 .. rows - 1, for which TorchRec would silently read row 0."""
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < rows:
        return
    first = int(((ids < 0) | (ids >= rows)).nonzero()[0])
    raise UserError(
        f"feature {feature} has an id outside its table t_{feature} of {rows} rows in {where(first)}: "
        f"got {int(ids[first])}; allowed: 0 to {rows - 1}. Fix: raise model.num_embeddings, or hash the ids "
        f"(Parquet: hash = true; Criteo: --data.criteo.modulo-ids true)"
    )


def check_labels(labels_B: Tensor, where: Where) -> None:
    """Raise UserError for a label that is NaN or outside 0 .. 1."""
    bad_B = ~((labels_B >= 0) & (labels_B <= 1))  # NaN fails both
    if bool(bad_B.any()):
        first = int(bad_B.nonzero()[0])
        raise UserError(
            f"wrong label in {where(first)}: got {float(labels_B[first])}; allowed: 0, 1 or a probability between. "
            f"Fix: correct or drop that row"
        )


def check_dense(features: Sequence[str], dense_BD: Tensor, where: Where) -> None:
    """Raise UserError for a NaN or infinite dense value, which would make all weights NaN in one step."""
    if math.isfinite(float(dense_BD.sum())):  # ten times faster than isfinite of each value; a sum may overflow
        return
    bad = (~torch.isfinite(dense_BD)).nonzero()
    if not bad.numel():
        return
    row, column = (int(i) for i in bad[0])
    raise UserError(
        f"wrong value of dense feature {features[column]} in {where(row)}: got {float(dense_BD[row, column])}; "
        f"allowed: finite numbers. Fix: correct or drop that row"
    )
