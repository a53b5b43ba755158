"""Criteo npy files: the contents that can be read, and errors that name the file and the row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import config_of, criteo_data, samples_of, serials, source_of, write_criteo

from trainer.data.base import Split
from trainer.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write days 0 and 1 with 40 and 25 rows, ids below 1,000."""
    write_criteo(tmp_path, [40, 25])
    return tmp_path


def message(folder: Path, split: Split = "train", **data: Any) -> str:
    """Return the error of a read of all rows."""
    config = config_of(criteo_data(folder, [0], [1]) | data)
    with pytest.raises(UserError) as caught:
        source_of(config, split).read(0, 100)
    return str(caught.value)


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    np.save(path, edit(np.load(path)))


def test_a_row_keeps_its_dense_values_its_ids_and_its_label(folder: Path) -> None:
    (sample,) = samples_of(source_of(config_of(criteo_data(folder, [0], [1])), "eval").read(3, 1))
    dense, sparse, labels = (np.load(folder / f"day_1_{part}.npy")[3] for part in ("dense", "sparse", "labels"))
    assert sample == (tuple(dense.tolist()), tuple((i,) for i in sparse.tolist()), float(labels))


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_type_give_the_same_batches(folder: Path, kind: type[Any]) -> None:
    change(folder / "day_0_sparse.npy", lambda ids: ids % 100)
    config = config_of(criteo_data(folder, [0], [1]))
    expected = samples_of(source_of(config).read(0, 40))
    change(folder / "day_0_sparse.npy", lambda ids: ids.astype(kind))
    assert samples_of(source_of(config).read(0, 40)) == expected


@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float32, np.float64])
def test_labels_of_any_number_type_give_the_same_batches(folder: Path, kind: type[Any]) -> None:
    config = config_of(criteo_data(folder, [0], [1]))
    expected = source_of(config).read(0, 40).labels_B
    change(folder / "day_0_labels.npy", lambda labels: labels.astype(kind))
    assert torch.equal(source_of(config).read(0, 40).labels_B, expected)


def test_labels_in_a_column_are_read_because_torchrec_writes_them_so(folder: Path) -> None:
    config = config_of(criteo_data(folder, [0], [1]))
    expected = source_of(config).read(0, 40).labels_B
    change(folder / "day_0_labels.npy", lambda labels: labels[:, None])
    assert torch.equal(source_of(config).read(0, 40).labels_B, expected)


def test_an_empty_day_next_to_others_is_allowed(folder: Path) -> None:
    write_criteo(folder, [0, 12])
    assert sorted(serials(source_of(config_of(criteo_data(folder, [0, 1], []))), 0, 12)) == list(range(12))


def test_modulo_maps_large_and_negative_ids_into_their_tables(folder: Path) -> None:
    change(
        folder / "day_0_sparse.npy", lambda ids: np.full_like(ids, -1) + (np.arange(26, dtype=ids.dtype) == 2) * 2_500
    )
    config = config_of(criteo_data(folder, [0], [1], criteo={"modulo_ids": True}), num_embeddings=[*range(10, 36)])
    ids = source_of(config).read(0, 1).sparse.values().tolist()
    assert ids == [rows - 1 if f != 2 else 2_499 % 12 for f, rows in enumerate(range(10, 36))]


@pytest.mark.parametrize("bad", [1_000, -1])
def test_an_id_outside_its_table_names_feature_row_and_value(folder: Path, bad: int) -> None:
    change(
        folder / "day_0_sparse.npy", lambda ids: np.where(np.arange(40 * 26).reshape(40, 26) == 21 * 26 + 4, bad, ids)
    )
    assert message(folder) == (
        f"feature cat_4 has an id outside its table t_cat_4 of 1000 rows in row 21 of {folder}/day_0_sparse.npy: "
        f"got {bad}; allowed: 0 to 999. Fix: raise model.num_embeddings, or hash the ids "
        f"(Parquet: hash = true; Criteo: --data.criteo.modulo-ids true)"
    )


def test_each_table_has_its_own_limit(folder: Path) -> None:
    config = config_of(criteo_data(folder, [0], [1]), num_embeddings=[1_000] * 25 + [500])
    with pytest.raises(UserError, match=r"feature cat_25 has an id outside its table t_cat_25 of 500 rows"):
        source_of(config).read(0, 40)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_dense_value_that_is_not_finite_names_its_row(folder: Path, bad: float) -> None:
    change(
        folder / "day_0_dense.npy",
        lambda dense: np.where(np.arange(40 * 13).reshape(40, 13) == 33 * 13 + 6, bad, dense),
    )
    assert message(folder) == (
        f"wrong value of dense feature dense_6 in row 33 of {folder}/day_0_dense.npy: got {bad}; "
        f"allowed: finite numbers. Fix: correct or drop that row"
    )


def test_dense_values_whose_sum_overflows_are_allowed(folder: Path) -> None:
    change(folder / "day_0_dense.npy", lambda dense: np.full_like(dense, 3e38))
    assert source_of(config_of(criteo_data(folder, [0], [1]))).read(0, 40).dense_BD.min() > 2e38


@pytest.mark.parametrize("bad", [np.nan, 2.0, -0.5])
def test_a_label_outside_0_to_1_names_its_row(folder: Path, bad: float) -> None:
    change(folder / "day_0_labels.npy", lambda labels: np.where(np.arange(40) == 17, bad, labels))
    assert message(folder) == (
        f"wrong label in row 17 of {folder}/day_0_labels.npy: got {bad}; allowed: 0, 1 or a probability between. "
        f"Fix: correct or drop that row"
    )


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "absent") == (
        f"data.path {tmp_path}/absent: no such folder on this machine; allowed: a folder with "
        f"day_N_{{dense,sparse,labels}}.npy"
    )


@pytest.mark.parametrize("part", ["dense", "sparse", "labels"])
def test_a_missing_file_is_named_with_its_day_and_the_existing_days(folder: Path, part: str) -> None:
    (folder / f"day_0_{part}.npy").unlink()
    assert message(folder) == (
        f"{folder}/day_0_{part}.npy is missing: data.criteo.train_days names day 0; "
        f"allowed: [1], the days with such a file. Fix: --data.criteo.train-days '[1]'"
    )


def test_a_missing_day_of_the_evaluation_names_its_option(folder: Path) -> None:
    data = criteo_data(folder, [0], [23])
    with pytest.raises(UserError, match=re.escape("data.criteo.eval_days names day 23; allowed: [0, 1]")):
        source_of(config_of(data), "eval")


def test_an_empty_list_of_days_is_refused(folder: Path) -> None:
    data = criteo_data(folder, [0], [])
    with pytest.raises(UserError, match=re.escape("data.criteo.eval_days is empty; allowed: one or more days")):
        source_of(config_of(data), "eval")


def test_days_without_any_row_are_refused(tmp_path: Path) -> None:
    write_criteo(tmp_path, [0])
    assert (
        message(tmp_path)
        == f"data.criteo.train_days names only days without rows in {tmp_path}: got [0]. Fix: add a day with rows"
    )


@pytest.mark.parametrize(
    ("part", "edit", "shape", "allowed"),
    [
        ("dense", lambda a: a[:, :12], "(40, 12)", "(40, 13)"),
        ("dense", lambda a: a[:39], "(39, 13)", "(40, 13)"),
        ("sparse", lambda a: a[:, :25], "(40, 25)", "(40, 26)"),
        ("labels", lambda a: a[:39], "(39,)", "(40,)"),
        ("labels", lambda a: np.stack([a, a], 1), "(40, 2)", "(40,)"),
    ],
)
def test_a_wrong_shape_is_reported_with_the_allowed_shape(
    folder: Path, part: str, edit: Callable[[Any], Any], shape: str, allowed: str
) -> None:
    change(folder / f"day_0_{part}.npy", edit)
    assert message(folder) == (
        f"wrong shape of {folder}/day_0_{part}.npy: got {shape}; allowed: {allowed}, "
        f"with the 40 rows of day_0_sparse.npy"
    )


@pytest.mark.parametrize(
    ("part", "kind", "allowed"),
    [("dense", np.int32, "floating point"), ("sparse", np.float32, "integers"), ("labels", np.str_, "numbers")],
)
def test_a_wrong_type_is_reported_with_the_allowed_types(
    folder: Path, part: str, kind: type[Any], allowed: str
) -> None:
    change(folder / f"day_0_{part}.npy", lambda array: array.astype(kind))
    text = message(folder)
    assert text.startswith(f"wrong content of {folder}/day_0_{part}.npy: got ")
    assert text.endswith(f"; allowed: an array of {allowed}")


@pytest.mark.parametrize("content", [b"", b"not an array", b"half"])
def test_a_broken_file_is_named(folder: Path, content: bytes) -> None:
    path = folder / "day_0_sparse.npy"
    path.write_bytes(path.read_bytes()[:500] if content == b"half" else content)
    text = message(folder)
    assert text.startswith(f"{path} is not a complete npy file (")
    assert text.endswith("Fix: write it again with numpy.save")


def test_a_bad_value_in_a_block_that_is_not_read_is_ignored(folder: Path) -> None:
    change(folder / "day_1_labels.npy", lambda labels: np.where(np.arange(25) == 24, np.nan, labels))
    assert serials(source_of(config_of(criteo_data(folder, [0], [1])), "eval"), 0, 16) == list(range(40, 56))
