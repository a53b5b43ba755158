"""A slow synthetic stream that leaves time for faults."""

from __future__ import annotations

import time

from odd_sources import Odd
from torch import Tensor

from trainer.data import Batch


class Slow(Odd):
    """A stream with 30 ms of delay per batch; set `data.options.at` beyond the run to avoid other faults."""

    def read(self, position: int, count: int) -> Batch:
        time.sleep(0.03)
        return super().read(position, count)

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        raise AssertionError("there is no odd sample")
