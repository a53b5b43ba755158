"""Parquet files: local folders and URIs, the cache of row groups, and errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_samples import config_of, parquet_data, serials, source_of, table_of, write_table
from parquet_reads import FOUR, read

from trainer.errors import UserError


def test_the_parquet_files_of_a_folder_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    write_table(tmp_path / "b.parquet", table_of(10, first=10))
    write_table(tmp_path / "a.parquet", table_of(10))
    write_table(tmp_path / "nested" / "c.parquet", table_of(10, first=20))
    (tmp_path / "_SUCCESS").touch()
    assert [int(v) for v in read(tmp_path).dense_BD[:, 0]] == list(range(20))


@pytest.fixture
def bucket() -> Iterator[str]:
    """Yield a folder in fsspec's memory file system, and delete it afterwards."""
    yield "memory://bucket"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)  # type: ignore[no-untyped-call]


def write_in_memory(uri: str, columns: dict[str, Any]) -> None:
    with fsspec.open(uri, "wb") as stream:  # type: ignore[no-untyped-call]
        pq.write_table(pa.table(columns), stream, row_group_size=7)


def test_a_uri_is_read_through_fsspec(bucket: str) -> None:
    write_in_memory(f"{bucket}/part-0.parquet", table_of(30))
    for uri in (f"{bucket}/part-0.parquet", bucket):
        assert serials(source_of(config_of(parquet_data("unused", uri)), "eval"), 0, 30) == list(range(30))


def test_a_bad_row_behind_a_uri_is_named_with_its_uri(bucket: str) -> None:
    write_in_memory(f"{bucket}/bad.parquet", FOUR | {"user": [1, 2, None, 4]})
    with pytest.raises(UserError, match=r"is null in row 2 of memory:///bucket/bad\.parquet"):
        source_of(config_of(parquet_data(f"{bucket}/bad.parquet"))).read(0, 4)


def test_rows_do_not_depend_on_the_cached_row_groups(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", table_of(100))
    small, large = (source_of(config_of(parquet_data(path, cache_groups=n))) for n in (1, 100))
    for position in (0, 95, 5, 180, 0, 42):
        assert serials(small, position, 30) == serials(large, position, 30)


def test_only_the_row_groups_that_are_needed_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(config_of(parquet_data(write_table(tmp_path / "x.parquet", table_of(100)), cache_groups=2)))
    decoded: list[int] = []
    decode = type(source)._decode  # type: ignore[attr-defined]
    monkeypatch.setattr(source._decoded, "_compute", lambda block: decoded.append(block) or decode(source, block))  # type: ignore[attr-defined, func-returns-value]
    for position in range(0, 100, 5):
        source.read(position, 5)
    assert sorted(decoded) == list(range(10))


@pytest.mark.parametrize(("option", "value"), [("label", "y"), ("dense", ["serial", "y"]), ("sparse", ["user", "y"])])
def test_a_missing_column_is_named_with_its_option_and_the_columns_of_the_file(
    tmp_path: Path, option: str, value: Any
) -> None:
    path = write_table(tmp_path / "x.parquet", FOUR | {"user": [1, 2, 3, 4]})
    with pytest.raises(UserError) as caught:
        read(path, **{option: value})
    assert str(caught.value) == (
        f"data.parquet.{option} names a column that is not in {path}: got y; allowed: label, serial, user"
    )


def test_every_file_of_a_folder_must_have_the_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", FOUR | {"user": [1, 2, 3, 4]})
    write_table(tmp_path / "b.parquet", FOUR)
    with pytest.raises(
        UserError, match=f"data.parquet.sparse names a column that is not in {tmp_path}/b.parquet: got user"
    ):
        read(tmp_path)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path / "absent")
    assert str(caught.value) == f"data.eval_path {tmp_path}/absent: no such file, and no folder with *.parquet files"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file, and no folder with \*\.parquet files"):
        read(tmp_path)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", {name: values[:0] for name, values in table_of(1).items()})
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == f"data.eval_path {path} has no rows"


def test_an_empty_file_next_to_others_is_allowed(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {name: values[:0] for name, values in table_of(1).items()})
    write_table(tmp_path / "b.parquet", table_of(10))
    assert read(tmp_path).labels_B.numel() == 10


@pytest.mark.parametrize("content", [b"", b"PAR1 but not really PAR1"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/x.parquet is not a complete Parquet file: "):
        read(tmp_path)


def test_a_file_that_is_damaged_inside_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", table_of(1_000), row_group_size=1_000)
    content = bytearray(path.read_bytes())
    content[10:200] = bytes(190)
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"cannot read row group 0 of {path}: "):
        read(path)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.path nowhere://x cannot be opened: ValueError: Protocol not known"):
        source_of(config_of(parquet_data("nowhere://x")))


def test_an_evaluation_without_its_own_path_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", table_of(5))
    with pytest.raises(UserError) as caught:
        source_of(config_of(parquet_data(path)), "eval")
    assert str(caught.value) == (
        "data.eval_path is missing: an evaluation needs its own Parquet files. Fix: --data.eval-path PATH"
    )
