"""The synthetic stream at a pace that leaves time for faults."""

from __future__ import annotations

import time

from odd_sources import Odd
from torch import Tensor

from trainer.data import Batch


class Slow(Odd):
    """Every batch takes 30 ms longer. Give it `data.options.at` beyond the run: nothing else is odd."""

    def read(self, position: int, count: int) -> Batch:
        time.sleep(0.03)
        return super().read(position, count)

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        raise AssertionError("there is no odd sample")
