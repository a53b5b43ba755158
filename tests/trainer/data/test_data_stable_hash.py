"""The hash of ids: its values never change, and it does not depend on the type of the column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from parquet_reads import hash_bytes, ids_of_column, read_column, row_of

from trainer.data.sources.stable_hash import hash_integers


def test_the_hash_of_integers_never_changes() -> None:
    # Trained embedding rows depend on these values.
    values = np.array([0, 1, -1, 2**63 - 1, -(2**63)])
    assert [f"{h:016x}" for h in hash_integers(values)] == [
        "e220a8397b1dcdaf", "910a2dec89025cc1", "e4d971771b652c20", "2a67d7552e039ea7", "481ec0a212a9f3db",
    ]  # fmt: skip


def test_the_hash_of_strings_never_changes() -> None:
    texts = (b"", b"a", b"eight-by", b"nine-byte", "Zürich ✓".encode(), bytes(16), bytes(17))
    assert [f"{h:016x}" for h in hash_bytes(*texts)] == [
        "e220a8397b1dcdaf", "5e025f9ade9eaf3e", "0a46830d1a620740", "36aa2c5904d17d56", "46f6065e1d59f2c8",
        "e032dcb999e67f99", "f4fcb2652433a66d",
    ]  # fmt: skip


def test_hashing_agrees_with_its_description_in_plain_python() -> None:
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 256, int(n)).astype(np.uint8).tobytes() for n in draw.integers(0, 40, 10_000)]
    assert hash_bytes(*texts).tolist() == [plain_hash(text) for text in texts]


def plain_hash(text: bytes) -> int:
    state = plain_mix(len(text))
    for start in range(0, len(text), 8):
        state = plain_mix(state ^ int.from_bytes(text[start : start + 8], "little"))
    return state


def plain_mix(state: int) -> int:
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]
)
def test_the_hash_of_text_does_not_depend_on_its_arrow_type(tmp_path: Path, kind: pa.DataType) -> None:
    texts = pa.array(["ann", "bob", "", "ann", "Zürich, a longer name"])
    expected = [[row_of(str(text), 1_000)] for text in texts.to_pylist()]
    assert ids_of_column(tmp_path, texts.cast(kind), hash=True) == expected


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float64(), pa.decimal128(20, 0)])
def test_the_hash_of_integers_does_not_depend_on_their_arrow_type(tmp_path: Path, kind: pa.DataType) -> None:
    expected = [[row_of(value, 50)] for value in (7, 100, 0)]
    assert ids_of_column(tmp_path, pa.array([7, 100, 0]).cast(kind), num_embeddings=50, hash=True) == expected


@pytest.mark.parametrize("value", [2**64 - 1, 2**63])
def test_the_largest_unsigned_integers_can_be_hashed(tmp_path: Path, value: int) -> None:
    assert ids_of_column(tmp_path, pa.array([value], pa.uint64()), hash=True) == [[plain_mix(value) % 1_000]]


def test_a_fill_is_hashed_like_any_value(tmp_path: Path) -> None:
    expected = [[row_of("ann", 1_000)], [row_of("unknown", 1_000)]]
    assert ids_of_column(tmp_path, ["ann", None], hash=True, fill="unknown") == expected


def test_hashing_spreads_over_all_rows_of_a_table(tmp_path: Path) -> None:
    batch = read_column(tmp_path, [f"user-{i}" for i in range(5_000)], num_embeddings=100, hash=True)
    counts = np.bincount(batch.sparse.values().numpy(), minlength=100)
    assert counts.min() > 15
    assert counts.max() < 95
