"""The exact area under the ROC curve of a data set that fits in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def area_under_curve(scores_B: Tensor, labels_B: Tensor) -> float:
    """Return the probability that a positive scores above a negative, ties half; 0.5 if a class is missing."""
    _, group_B, sizes = torch.unique(scores_B, return_inverse=True, return_counts=True)
    last_rank = sizes.cumsum(0).double()
    rank_B = (last_rank - (sizes - 1) / 2)[group_B]  # from 1; equal scores share their mean rank
    positives = labels_B.double()
    num_positive = float(positives.sum())
    num_negative = labels_B.numel() - num_positive
    if not num_positive or not num_negative:
        return 0.5
    above = float((rank_B * positives).sum()) - num_positive * (num_positive + 1) / 2
    return above / (num_positive * num_negative)
