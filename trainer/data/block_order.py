"""Map positions of the endless stream to rows of a finite data set that is stored in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.lru import LruCache

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Epoch:
    blocks: Rows  # in reading order
    starts: Rows  # samples of this epoch before each block


class BlockOrder:
    """The stream of samples of a data set in blocks of `sizes` rows (none empty), epoch after epoch.

    With `shuffle`, an epoch permutes the blocks and the rows inside each block, with numpy's generator seeded by
    (seed, epoch) and (seed, epoch, block). So a reader needs only one block at a time. Without it, every epoch has the
    order of the files.
    """

    def __init__(self, sizes: Sequence[int], seed: int, shuffle: bool) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._seed, self._shuffle = seed, shuffle
        self.num_samples = int(self._sizes.sum())
        self._epochs: LruCache[int, _Epoch] = LruCache(self._make_epoch, 2)
        self._rows: LruCache[tuple[int, int], Rows] = LruCache(self._make_rows, 2)

    def locate(self, position: int, count: int) -> Iterator[tuple[int, Rows]]:
        """Yield (block, rows in it) of samples `position` .. `position + count - 1`, in order."""
        while count > 0:
            epoch_number, offset = divmod(position, self.num_samples)
            epoch = self._epochs[epoch_number]
            turn = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
            block, first = int(epoch.blocks[turn]), offset - int(epoch.starts[turn])
            rows = self._rows[epoch_number, block][first : first + count]
            yield block, rows
            position, count = position + rows.size, count - rows.size

    def _make_epoch(self, epoch: int) -> _Epoch:
        blocks = np.arange(self._sizes.size)
        if self._shuffle:
            blocks = np.random.default_rng((self._seed, epoch)).permutation(blocks)
        ends = self._sizes[blocks].cumsum()
        return _Epoch(blocks, ends - self._sizes[blocks])

    def _make_rows(self, epoch_and_block: tuple[int, int]) -> Rows:
        rows = np.arange(self._sizes[epoch_and_block[1]])
        if self._shuffle:
            np.random.default_rng((self._seed, *epoch_and_block)).shuffle(rows)
        return rows
