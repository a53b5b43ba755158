"""Convert Arrow columns to numpy arrays of checked numbers and ids. Each error names the column and the row.

Shapes: N rows of the table, V ids of a multi-valued column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainer.config import DenseColumn, SparseColumn
from trainer.data.checks import Where, check_dense, check_ids, check_labels
from trainer.data.ids import Ids, Integers
from trainer.data.sources.stable_hash import hash_integers, hash_strings
from trainer.errors import UserError

Floats = npt.NDArray[np.float32]


def label_values(column: pa.ChunkedArray[Any], name: str, where: Where) -> Floats:
    """Return (N,) labels in [0, 1] from booleans, integers, floats or decimals."""
    labels = _by_chunk(column, where, lambda array, at: _numbers(array, name, "data.parquet.label", None, at))
    labels_N = np.concatenate(labels).astype(np.float32)
    check_labels(torch.from_numpy(labels_N), where)
    return labels_N


def dense_values(column: pa.ChunkedArray[Any], option: DenseColumn, where: Where) -> Floats:
    """Return (N,) finite numbers: replace nulls and NaN by `fill`, then transform in float64."""
    name = option.column
    parts = _by_chunk(column, where, lambda array, at: _numbers(array, name, "data.parquet.dense", option.fill, at))
    values_N = np.concatenate(parts)
    if option.transform == "log1p":
        values_N = np.log1p(np.maximum(values_N, 0.0))
    elif option.transform == "standardize":
        values_N = (values_N - option.mean) / option.std
    result_N = values_N.astype(np.float32)
    check_dense([name], torch.from_numpy(result_N)[:, None], where)
    return result_N


def sparse_ids(column: pa.ChunkedArray[Any], option: SparseColumn, rows: int, where: Where) -> Ids:
    """Return ids in 0 .. rows - 1: the column's integers, or a hash of integers or strings modulo `rows`."""
    parts = _by_chunk(column, where, lambda array, at: _list_or_scalar_ids(array, option, rows, at))
    ids = Ids.join(parts)
    return Ids(ids.values.astype(np.int32 if rows < 2**31 else np.int64), ids.offsets)


def is_multi_valued(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _by_chunk(column: pa.ChunkedArray[Any], where: Where, decode: Callable[[pa.Array[Any], Where], Any]) -> list[Any]:
    """Call `decode(chunk, where)` for every chunk of the column; its `where` counts from the chunk's first row."""
    results, start = [], 0
    for chunk in column.chunks:
        results.append(decode(_plain(chunk), partial(_shifted, where, start)))
        start += len(chunk)
    return results


def _shifted(where: Where, start: int, i: int) -> str:
    """Return the place of value `start + i`."""
    return where(start + i)


def _plain(array: pa.Array[Any]) -> pa.Array[Any]:
    """Return the array without dictionary encoding."""
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


def _numbers(array: pa.Array[Any], name: str, option: str, fill: float | None, where: Where) -> npt.NDArray[np.float64]:
    """Return (N,) float64; raise UserError for a null without `fill`. A NaN without `fill` stays."""
    kind = array.type
    numeric = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_null)
    if not any(is_kind(kind) for is_kind in numeric):
        raise UserError(
            f"wrong type of column {name} of {option}: got {kind}; allowed: numbers, booleans. Fix: cast it in the file"
        )
    missing_N = _missing(array, name, option, fill, where)
    values_N = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if fill is not None:
        values_N = np.where(missing_N | np.isnan(values_N), fill, values_N)
    return values_N


def _missing(
    array: pa.Array[Any], name: str, option: str, fill: float | str | None, where: Where
) -> npt.NDArray[np.bool_]:
    """Return (N,) whether each value is null; raise UserError for the first null without `fill`."""
    missing_N = np.zeros(len(array), dtype=np.bool_)
    if array.null_count:
        missing_N = array.is_null().to_numpy(zero_copy_only=False)
        if fill is None:
            fix = "drop such rows" if option.endswith("label") else "set the column's fill"
            raise UserError(f"column {name} of {option} is null in {where(int(missing_N.argmax()))}. Fix: {fix}")
    return missing_N


def _list_or_scalar_ids(array: pa.Array[Any], option: SparseColumn, rows: int, where: Where) -> Ids:
    """Return the ids of a column of lists or single values; a null list becomes a list with `fill`."""
    if not isinstance(array, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        return Ids(_scalar_ids(array, option, rows, where))
    missing_N = _missing(array, option.column, "data.parquet.sparse", option.fill, where)
    if isinstance(array, (pa.ListArray, pa.LargeListArray)) and not array.null_count:
        return _lists(array, option, rows, where)
    lengths: Any = pc.list_value_length(array)  # the stub lacks lists
    lengths_N = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends_N = lengths_N.cumsum()
    values_V = _scalar_ids(
        _plain(array.flatten()), option, rows, lambda i: where(int(np.searchsorted(ends_N, i, side="right")))
    )
    if missing_N.any():
        fill = _scalar_ids(_plain(pa.nulls(1, array.type.value_type)), option, rows, where)
        values_V = np.insert(values_V, ends_N[missing_N], fill)
        lengths_N[missing_N] = 1
    return Ids.from_lengths(values_V, lengths_N)


def _lists(array: pa.ListArray[Any] | pa.LargeListArray[Any], option: SparseColumn, rows: int, where: Where) -> Ids:
    """Return the ids of lists without nulls, with the offsets that Arrow has."""
    offsets_N1 = array.offsets.to_numpy()
    values_V = _scalar_ids(
        _plain(array.flatten()),
        option,
        rows,
        lambda i: where(int(offsets_N1[1:].searchsorted(i + offsets_N1[0], side="right"))),
    )
    return Ids(values_V, offsets_N1.astype(np.int64) - offsets_N1[0])


def _scalar_ids(array: pa.Array[Any], option: SparseColumn, rows: int, where: Where) -> Integers:
    """Return (N,) ids of a column without lists."""
    if pa.types.is_null(array.type):
        array = array.cast(pa.string() if isinstance(option.fill, str) else pa.int64())
    missing_N = _missing(array, option.column, "data.parquet.sparse", option.fill, where)
    if missing_N.any():
        array = _filled(array, option)
    if option.hash:
        return _modulo(_hashes(array, option), rows)
    ids_N = _integers(array, option)
    if ids_N.size and (ids_N.min() < 0 or ids_N.max() >= rows):
        check_ids(option.column, rows, torch.from_numpy(ids_N.copy()), where)
    return ids_N


def _modulo(hashes_N: npt.NDArray[np.uint64], rows: int) -> Integers:
    """Return the remainders, computed in place.

    numpy divides an array by one number with multiplications, but computes remainders with a division per value.
    """
    quotients_N = hashes_N // np.uint64(rows)
    quotients_N *= np.uint64(rows)
    hashes_N -= quotients_N
    return hashes_N.view(np.int64)


def _filled(array: pa.Array[Any], option: SparseColumn) -> pa.Array[Any]:
    """Replace nulls by `fill`; raise UserError if `fill` does not have the column's type."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int64())
    try:
        return pc.fill_null(array, pa.scalar(option.fill, type=array.type))
    except (pa.ArrowException, TypeError) as error:
        raise UserError(
            f"wrong fill of column {option.column} in data.parquet.sparse: got {option.fill!r}; "
            f"allowed: a value of the column's type {array.type}"
        ) from error


def _hashes(array: pa.Array[Any], option: SparseColumn) -> npt.NDArray[np.uint64]:
    """Return (N,) hashes of strings, bytes or integers."""
    kind = array.type
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    if not any(is_kind(kind) for is_kind in text + binary):
        return hash_integers(_integers(array, option))
    narrow = pa.types.is_string(kind) or pa.types.is_binary(kind)
    array = array if narrow else array.cast(pa.large_binary())
    _, offsets, data = (memoryview(buffer or b"") for buffer in array.buffers())
    offsets_N = np.frombuffer(offsets, np.int32 if narrow else np.int64)[array.offset : array.offset + len(array) + 1]
    return hash_strings(np.frombuffer(data, np.uint8), offsets_N.astype(np.int64, copy=False))


def _integers(array: pa.Array[Any], option: SparseColumn) -> Integers:
    """Return (N,) read-only int64 from integers, booleans, or integral floats and decimals (as nulls cause)."""
    kind = array.type
    numeric = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if not any(is_kind(kind) for is_kind in numeric):
        allowed = "integers, strings or lists of them" if option.hash else "integers or lists; strings need hash = true"
        raise UserError(f"wrong type of column {option.column} of data.parquet.sparse: got {kind}; allowed: {allowed}")
    if pa.types.is_uint64(kind):
        return array.to_numpy(zero_copy_only=False).view(np.int64)
    try:
        return array.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"wrong value in column {option.column} of data.parquet.sparse: got {kind} that is not integral ({error}); "
            f"allowed: integers, strings"
        ) from error
