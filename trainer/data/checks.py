"""Checks of values that would train a wrong model in silence; each error says where the value is and what is legal.

`where(i)` puts the place of the i-th value into words: "sample 17" of a stream, "row 17 of day_0_dense.npy" of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.errors import UserError

Where = Callable[[int], str]


def check_ids(feature: str, rows: int, ids: Tensor, where: Where) -> None:
    """Raises UserError for an id outside 0 .. rows - 1: TorchRec would silently read row 0 for one past the end."""
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < rows:
        return
    first = int(((ids < 0) | (ids >= rows)).nonzero()[0])
    raise UserError(
        f"feature {feature} has id {int(ids[first])} in {where(first)}, but its table t_{feature} has {rows} rows "
        f"(legal: 0 to {rows - 1}); raise model.num_embeddings, or ask for hashing "
        f"(Parquet: hash = true; Criteo: --data.criteo.modulo-ids true)"
    )


def check_labels(labels_B: Tensor, where: Where) -> None:
    """Raises UserError for a label that is NaN or outside 0 .. 1."""
    bad_B = ~((labels_B >= 0) & (labels_B <= 1))  # NaN fails both
    if bool(bad_B.any()):
        first = int(bad_B.nonzero()[0])
        raise UserError(
            f"label of {where(first)} is {float(labels_B[first])}: a label is 0, 1 or a probability between; "
            f"mend or drop that row of the data"
        )


def check_dense(features: Sequence[str], dense_BD: Tensor, where: Where) -> None:
    """Raises UserError for a dense value that is NaN or infinite, which would make every weight NaN in one step."""
    if math.isfinite(float(dense_BD.sum())):  # ten times faster than isfinite; an overflowing sum takes the next line
        return
    bad = (~torch.isfinite(dense_BD)).nonzero()
    if not bad.numel():
        return
    row, column = (int(i) for i in bad[0])
    raise UserError(
        f"dense feature {features[column]} of {where(row)} is {float(dense_BD[row, column])}: legal is "
        f"any finite number; mend or drop that row of the data"
    )
