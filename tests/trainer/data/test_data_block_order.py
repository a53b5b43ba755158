"""The order of samples that are stored in blocks."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.data.block_order import BlockOrder


def locations(order: BlockOrder, position: int, count: int) -> list[tuple[int, int]]:
    """Return (block, row) of each sample."""
    return [(block, int(row)) for block, rows in order.locate(position, count) for row in rows]


def test_every_epoch_has_another_order_of_blocks() -> None:
    order = BlockOrder([1] * 50, seed=1, shuffle=True)
    epochs = [[block for block, _ in locations(order, 50 * number, 50)] for number in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_every_epoch_has_another_order_of_rows() -> None:
    order = BlockOrder([50], seed=1, shuffle=True)
    epochs = [[row for _, row in locations(order, 50 * number, 50)] for number in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_two_blocks_of_the_same_size_have_their_rows_in_different_orders() -> None:
    order = BlockOrder([50, 50], seed=1, shuffle=True)
    rows = [[row for block, row in locations(order, 0, 100) if block == number] for number in (0, 1)]
    assert rows[0] != rows[1]


def test_the_rows_of_a_block_are_contiguous() -> None:
    blocks = [block for block, _ in locations(BlockOrder([10] * 5, seed=1, shuffle=True), 0, 50)]
    assert all(len(set(blocks[start : start + 10])) == 1 for start in range(0, 50, 10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_pieces_end_at_the_ends_of_blocks_and_epochs(shuffle: bool) -> None:
    order = BlockOrder([3, 4, 5], seed=1, shuffle=shuffle)
    sizes = [rows.size for _, rows in order.locate(0, 24)]
    assert sorted(sizes) == [3, 3, 4, 4, 5, 5]


def test_blocks_of_different_sizes_are_covered() -> None:
    sizes = [int(n) for n in np.random.default_rng(0).integers(1, 30, 40)]
    order = BlockOrder(sizes, seed=1, shuffle=True)
    expected = [(block, row) for block, size in enumerate(sizes) for row in range(size)]
    assert sorted(locations(order, order.num_samples * 5, order.num_samples)) == expected


def test_the_order_of_a_seed_never_changes() -> None:
    # A run that resumes with a newer numpy must continue in the same order.
    assert locations(BlockOrder([2, 3, 1], seed=7, shuffle=True), 0, 12) == [
        (0, 0),
        (0, 1),
        (2, 0),
        (1, 0),
        (1, 2),
        (1, 1),
        (0, 0),
        (0, 1),
        (2, 0),
        (1, 2),
        (1, 0),
        (1, 1),
    ]
