"""Ids of many samples as flat arrays, from which rows are selected with one numpy gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ids:
    """Cells of ids: without offsets one id each, else cell c has `values[offsets[c]:offsets[c + 1]]`.

    A column of N rows has N cells. F stacked columns have F N cells; row i of column f is cell f N + i.
    """

    values: npt.NDArray[Any]
    offsets: Integers | None = None

    @staticmethod
    def from_lengths(values: npt.NDArray[Any], lengths: Integers) -> Ids:
        """Return cells with `lengths[c]` ids in cell c."""
        offsets = np.zeros(lengths.size + 1, dtype=np.int64)
        lengths.cumsum(out=offsets[1:])
        return Ids(values, offsets)

    @staticmethod
    def join(parts: Sequence[Ids]) -> Ids:
        """Return the cells of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([part.values for part in parts])
        if all(part.offsets is None for part in parts):
            return Ids(values)
        # Shifting the offsets of each part takes half as many passes as summing up all lengths.
        offsets = np.zeros(1 + sum(part.num_cells for part in parts), dtype=np.int64)
        cell = value = 0
        for part in parts:
            ends = np.arange(1, part.values.size + 1) if part.offsets is None else part.offsets[1:]
            np.add(ends, value, out=offsets[cell + 1 : cell + 1 + part.num_cells])
            cell += part.num_cells
            value += part.values.size
        return Ids(values, offsets)

    @property
    def num_cells(self) -> int:
        """Return the number of cells."""
        return self.values.size if self.offsets is None else self.offsets.size - 1

    @property
    def lengths(self) -> Integers:
        """Return the number of ids in each cell."""
        return np.ones(self.values.size, np.int64) if self.offsets is None else np.diff(self.offsets)

    def take(self, cells: Integers) -> Ids:
        """Return these cells, in the given order."""
        if self.offsets is None:
            return Ids(self.values.take(cells))
        starts = self.offsets.take(cells)
        lengths = self.offsets.take(cells + 1)
        lengths -= starts
        taken = Ids.from_lengths(self.values, lengths)
        assert taken.offsets is not None
        places = np.repeat(starts - taken.offsets[:-1], lengths)
        places += np.arange(places.size)
        return Ids(self.values.take(places), taken.offsets)

    def take_rows(self, rows: Integers, num_rows: int) -> Ids:
        """Return these rows of each stacked column of `num_rows` rows, as stacked columns."""
        if self.offsets is None:
            return Ids(self.values.reshape(-1, num_rows).take(rows, axis=1).reshape(-1))
        first_cells = np.arange(0, self.num_cells, num_rows)
        return self.take((first_cells[:, None] + rows).reshape(-1))

    @staticmethod
    def join_columns(parts: Sequence[Ids], num_rows: Sequence[int]) -> Ids:
        """Return the stacked columns of parts with the same columns; part p has `num_rows[p]` rows."""
        first_cells = np.cumsum([0, *(part.num_cells for part in parts)])
        cells = [
            np.arange(first, first + part.num_cells).reshape(-1, rows)
            for first, part, rows in zip(first_cells, parts, num_rows, strict=False)
        ]
        return Ids.join(parts).take(np.concatenate(cells, axis=1).reshape(-1))
