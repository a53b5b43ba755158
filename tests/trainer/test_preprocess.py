"""The preprocess command writes the same arrays as TorchRec, in bounded memory, and can resume."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from small_jobs import ROOT, environment, trainer

from trainer.bench.measures.preprocess import stock_npys, write_clicks
from trainer.config.options import load_config
from trainer.data import SourceContext, open_source
from trainer.data.sources.stable_hash import hash_integers
from trainer.main import main
from trainer.preprocess import output as output_module
from trainer.preprocess import rows as rows_module
from trainer.preprocess import vocabulary
from trainer.preprocess.parse import Text, parse, row_error

ROW = b"1\t" + b"\t".join(b"%d" % i for i in range(13)) + b"\t" + b"\t".join(b"%08x" % i for i in range(26)) + b"\n"
PARTS = ("dense", "sparse", "labels")


def preprocess(source: Path | str, output: Path, *options: str) -> int:
    """Run the command in this process and return its exit code."""
    return main(["preprocess", "--input", str(source), "--output", str(output), "--progress", "lines", *options])


def day(output: Path, number: int, part: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(output / f"day_{number}_{part}.npy")
    return array


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails with exit code 2, and return its error."""
    assert main(["preprocess", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, f"one line, no stack trace: {message}"
    assert message.startswith("error: ")
    return message


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of 5,003 rows, a prime number, so that it has partial blocks of every size."""
    path = tmp_path_factory.mktemp("clicks") / "train.txt"
    write_clicks(path, 5_003, seed=3)
    return path


@pytest.fixture(scope="module")
def stock(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that TorchRec's tsv_to_npys writes for it."""
    return {part: np.load(path) for part, path in stock_npys(clicks, tmp_path_factory.mktemp("stock")).items()}


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of three days, one of them compressed."""
    folder = tmp_path_factory.mktemp("days")
    for number, rows in enumerate((701, 500, 299)):
        write_clicks(folder / f"day_{number}", rows, seed=number)
    plain = folder / "day_1"
    with gzip.open(folder / "day_1.gz", "wb") as stream:
        stream.write(plain.read_bytes())
    plain.unlink()
    return folder


# --- equality with TorchRec -----------------------------------------------------------------------------------------


def test_raw_arrays_equal_torchrecs_bit_for_bit(
    clicks: Path, stock: dict[str, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    assert preprocess(clicks, tmp_path / "out") == 0
    for part in PARTS:
        ours = np.concatenate([day(tmp_path / "out", number, part) for number in range(7)])
        assert ours.dtype == stock[part].dtype, part
        assert ours.shape == stock[part].shape, part
        assert ours.tobytes() == stock[part].tobytes(), f"{part} differs from tsv_to_npys"


def test_a_single_file_is_split_into_seven_days_of_almost_equal_size(clicks: Path, tmp_path: Path) -> None:
    assert preprocess(clicks, tmp_path / "out") == 0
    assert [len(day(tmp_path / "out", n, "labels")) for n in range(7)] == [715] * 5 + [714] * 2


def test_each_file_of_a_folder_is_a_day_with_its_own_smallest_value(days: Path, tmp_path: Path) -> None:
    assert preprocess(days, tmp_path / "out") == 0
    plain = tmp_path / "plain.txt"
    for number in range(3):
        stored = days / f"day_{number}"
        text = stored.read_bytes() if stored.exists() else gzip.decompress((days / f"day_{number}.gz").read_bytes())
        plain.write_bytes(text)
        for part, path in stock_npys(plain, tmp_path).items():
            assert day(tmp_path / "out", number, part).tobytes() == path.with_suffix(".npy").read_bytes()[128:]


def test_frequent_ids_get_the_same_numbers_as_in_torchrec(
    days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrec.datasets.criteo import BinaryCriteoUtils

    from trainer.bench.measures.preprocess import _local_iopath

    assert preprocess(days, tmp_path / "raw") == 0
    monkeypatch.setattr(vocabulary, "_CHUNK", 128)
    assert preprocess(days, tmp_path / "ours", "--ids", "frequency", "--threshold", "3") == 0
    with _local_iopath():
        files = [str(tmp_path / "raw" / f"day_{n}_sparse.npy") for n in range(3)]
        BinaryCriteoUtils.sparse_to_contiguous(files, str(tmp_path), 3)
    for number in range(3):
        theirs = np.load(tmp_path / f"day_{number}_sparse_contig_freq.npy")
        assert np.array_equal(day(tmp_path / "ours", number, "sparse"), theirs)
    rows = json.loads((tmp_path / "ours" / "_COMPLETE.json").read_text())["rows_per_feature"]
    largest = np.max([day(tmp_path / "ours", n, "sparse").max(axis=0) for n in range(3)], axis=0)
    assert rows == (largest + 1).tolist(), "a table needs a row for each number"


def test_counts_that_exceed_the_memory_give_the_same_vocabulary(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ids = (draw.zipf(1.3, 20_000) % 5_000).astype(np.uint32)
    vocabularies = []
    for budget in (1 << 30, 20_000):
        counts = vocabulary.Counts(tmp_path / str(budget), budget)
        for start in range(0, ids.size, 500):
            counts.add(ids[start : start + 500], start)
        vocabularies.append(counts.frequent(2))
    assert not (tmp_path / str(1 << 30)).exists(), "counts that fit must stay in memory"
    assert len(list((tmp_path / "20000").iterdir())) > vocabulary._PARTS, "the small budget had no effect"
    values, first, count = np.unique(ids, return_index=True, return_counts=True)
    expected = values[count >= 2][first[count >= 2].argsort()]
    assert np.array_equal(vocabularies[0], expected)
    assert np.array_equal(vocabularies[1], expected)


# --- other options -----------------------------------------------------------------------------------------------


def test_hashed_ids_equal_those_of_the_parquet_source(clicks: Path, tmp_path: Path) -> None:
    assert preprocess(clicks, tmp_path / "raw") == 0
    rows = [100 + f for f in range(26)]
    assert preprocess(clicks, tmp_path / "hash", "--ids", "hash", "--rows", ",".join(map(str, rows))) == 0
    raw, hashed = day(tmp_path / "raw", 2, "sparse"), day(tmp_path / "hash", 2, "sparse")
    for feature in range(26):
        expected = hash_integers(raw[:, feature].copy()) % np.uint64(rows[feature])
        assert np.array_equal(hashed[:, feature], expected.astype(np.int32))


@pytest.mark.parametrize("ids", [["raw"], ["hash", "--rows", "1000"], ["frequency"]])
@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_the_trainer_reads_what_was_written(ids: list[str], kind: str, clicks: Path, tmp_path: Path) -> None:
    assert preprocess(clicks, tmp_path / "out", "--ids", *ids, "--format", kind) == 0
    config = load_config(["--config", str(tmp_path / "out" / "train.json"), "--data.shuffle", "false"], {})
    for split, count in (("train", 4_289), ("eval", 714)):
        source = open_source(SourceContext(config, split, torch.device("cpu")))
        assert source.samples_per_epoch == count
        batch = source.read(0, count)
        assert batch.dense_BD.shape == (count, 13)
        assert batch.dense_BD.min() >= np.float32(np.log(2))
    if ids != ["raw"]:
        assert config.rows_per_table == tuple(
            json.loads((tmp_path / "out" / "_COMPLETE.json").read_text())["rows_per_feature"]
        )


def test_parquet_files_have_the_same_rows_as_npy_files(clicks: Path, tmp_path: Path) -> None:
    assert preprocess(clicks, tmp_path / "npy") == 0
    assert preprocess(clicks, tmp_path / "parquet", "--format", "parquet") == 0
    for number, folder in ((0, "train"), (6, "eval")):
        table = pq.read_table(tmp_path / "parquet" / folder / f"day_{number}.parquet")
        assert np.array_equal(table["label"].to_numpy(), day(tmp_path / "npy", number, "labels")[:, 0])
        for i in range(13):
            assert np.array_equal(table[f"dense_{i}"].to_numpy(), day(tmp_path / "npy", number, "dense")[:, i])
        for i in range(26):
            assert np.array_equal(table[f"cat_{i}"].to_numpy(), day(tmp_path / "npy", number, "sparse")[:, i])


def whole_rows(output: Path, numbers: range) -> list[bytes]:
    """Return every row of some days as bytes."""
    parts = [np.concatenate([day(output, n, part) for n in numbers]) for part in PARTS]
    return [b"".join(row.tobytes() for row in rows) for rows in zip(*parts, strict=True)]


def test_a_shuffle_moves_every_training_row_and_keeps_the_last_day(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preprocess(clicks, tmp_path / "plain") == 0
    monkeypatch.setattr(rows_module, "BUCKET_ROWS", 512)
    monkeypatch.setattr(rows_module, "BLOCK_ROWS", 100)
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        assert preprocess(clicks, tmp_path / name, "--shuffle", "--seed", seed) == 0
    plain, one = whole_rows(tmp_path / "plain", range(6)), whole_rows(tmp_path / "one", range(6))
    assert sorted(one) == sorted(plain), "a row is lost, duplicated or mixed with another"
    at = {row: i for i, row in enumerate(plain)}
    moved = np.array([at[row] for row in one])
    assert abs(np.corrcoef(moved, np.arange(moved.size))[0, 1]) < 0.05, "rows stay near their old position"
    assert one == whole_rows(tmp_path / "again", range(6)), "the same seed gives another order"
    assert one != whole_rows(tmp_path / "two", range(6)), "the seed has no effect"
    for part in PARTS:
        assert np.array_equal(day(tmp_path / "one", 6, part), day(tmp_path / "plain", 6, part))


def test_an_object_store_is_read_like_a_folder(days: Path, tmp_path: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(str(days), "/criteo", recursive=True)
    try:
        assert preprocess("memory://criteo", tmp_path / "remote", "--days", "0,1") == 0
    finally:
        store.rm("/criteo", recursive=True)
    assert preprocess(days, tmp_path / "local", "--days", "0,1") == 0
    for number in (0, 1):
        for part in PARTS:
            assert np.array_equal(day(tmp_path / "remote", number, part), day(tmp_path / "local", number, part))
    assert not (tmp_path / "remote" / "day_2_labels.npy").exists(), "--days has no effect"


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (ROW.replace(b"\t", b"", 1), "wrong number of columns: got 39; allowed: 40"),
        (b"\t" + ROW, "wrong number of columns: got 41; allowed: 40"),
        (b"\n", "wrong number of columns: got 1; allowed: 40"),
        (b"2" + ROW[1:], "wrong label in column 1: got '2'; allowed: 0 or 1"),
        (
            ROW.replace(b"\t11\t", b"\t1.1\t"),
            "wrong value in column 13: got '1.1'; allowed: a 32-bit integer or nothing",
        ),
        (ROW.replace(b"\t11\t", b"\t-\t"), "wrong value in column 13: got '-'; allowed: a 32-bit integer"),
        (ROW.replace(b"\t11\t", b"\t1-\t"), "wrong value in column 13: got '1-'; allowed: a 32-bit integer"),
        (
            ROW.replace(b"\t11\t", b"\t2147483648\t"),
            "wrong value in column 13: got '2147483648'; allowed: a 32-bit integer",
        ),
        (
            ROW.replace(b"\t11\t", b"\t12345678901\t"),
            "wrong value in column 13: got '12345678901'; allowed: a 32-bit integer",
        ),
        (
            ROW.replace(b"0000000a", b"0000000g"),
            "wrong value in column 25: got '0000000g'; allowed: up to 8 hexadecimal digits",
        ),
        (
            ROW.replace(b"0000000a", b"00000000a"),
            "wrong value in column 25: got '00000000a'; allowed: up to 8 hexadecimal digits",
        ),
        (
            ROW.replace(b"0000000a", b"000 000a"),
            "wrong value in column 25: got '000 000a'; allowed: up to 8 hexadecimal digits",
        ),
    ],
)
def test_a_malformed_row_is_reported_with_file_line_and_value(
    row: bytes, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "train.txt"
    source.write_bytes(ROW * 300 + row + ROW * 200)
    arguments = ["--input", str(source), "--output", str(tmp_path / "out")]
    message = error_line(capsys, *arguments)
    assert f"{source} line 301: {part}" in message
    assert "--bad-rows skip" in message
    assert not list((tmp_path / "out").glob("day_*")), "an incomplete day has its final name"


def test_malformed_rows_can_be_skipped_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = ROW.replace(b"\t", b"", 1)
    (tmp_path / "train.txt").write_bytes(ROW * 300 + bad + ROW * 100 + bad + ROW * 7 + bad)
    assert preprocess(tmp_path / "train.txt", tmp_path / "out", "--bad-rows", "skip", "--cut-days", "2") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["rows"], result["bad_rows"]) == (407, 3)
    lines = [line.split(":")[0] for line in result["bad_lines"]]
    assert lines == ["train.txt line 301", "train.txt line 402", "train.txt line 410"]


@pytest.mark.parametrize("character", [bytes([c]) for c in range(256) if c not in b"\t\n\r"])
def test_both_parsers_accept_the_same_characters(character: bytes) -> None:
    for place in (b"\t11\t", b"0000000a"):
        for field in (character, b"1" + character, character + b"1"):
            row = ROW.replace(place, (b"\t%s\t" if place[:1] == b"\t" else b"%s") % field)
            good, bad = parse(Text.of(ROW + row + ROW))
            assert (len(bad) == 1) == (row_error(row[:-1]) is not None), row
            if not bad:
                assert good.labels.size == 3
                number = int(field, 16) if place[:1] != b"\t" else int(field)
                assert number in (good.sparse[10, 1], good.dense[1, 11])


def test_numbers_of_every_length_and_sign_are_parsed() -> None:
    numbers = [0, 7, -1, 99, -12, 123, 65_535, -123_456, 1_234_567, 12_345_678, -12_345_678, 2**31 - 1, -(2**31)]
    ids = [0x0, 0xF, 0xAB, 0xFED, 0xFFFF_FFFF, *range(21)]
    fields = [b"0", *(b"%d" % n for n in numbers), *(b"%x" % i for i in ids)]
    rows, bad = parse(Text.of(b"\t".join(fields) + b"\n" + b"\t" * 39 + b"\n"))
    assert not bad
    assert rows.dense.tolist() == [numbers, [0] * 13], "an empty field is 0"
    assert rows.sparse.T.tolist() == [ids, [0] * 26]


def test_windows_line_ends_and_a_missing_last_newline_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes((ROW * 9).replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    assert preprocess(tmp_path / "train.txt", tmp_path / "out", "--cut-days", "1") == 0
    assert day(tmp_path / "out", 0, "sparse").tolist() == [list(range(26))] * 9


# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_complete_output_is_not_written_again(days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(days, tmp_path / "out") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert preprocess(days, tmp_path / "out") == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert '"event": "skipped"' in capsys.readouterr().out
    marker = json.loads((tmp_path / "out" / "_COMPLETE.json").read_text())
    assert marker["days"] == {"0": 701, "1": 500, "2": 299}
    assert marker["options"]["ids"] == "raw"
    assert not (tmp_path / "out" / ".staging").exists(), "temporary files are left"


def test_changed_options_are_refused_with_both_values(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preprocess(days, tmp_path / "out") == 0
    capsys.readouterr()
    message = error_line(capsys, "--input", str(days), "--output", str(tmp_path / "out"), "--shuffle")
    assert "was started with --seed null: got 0" in message or "--shuffle false: got true" in message
    assert f"rm -r {tmp_path / 'out'}" in message


def test_a_changed_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "train.txt"
    source.write_bytes(ROW * 10)
    assert preprocess(source, tmp_path / "out") == 0
    source.write_bytes(ROW * 11)
    capsys.readouterr()
    message = error_line(capsys, "--input", str(source), "--output", str(tmp_path / "out"))
    assert f"{source} has changed since --output" in message


def test_a_damaged_day_keeps_the_days_before_it_and_a_rerun_resumes(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for number in (0, 2):
        (source / f"day_{number}").write_bytes((days / f"day_{number}").read_bytes())
    whole = (days / "day_1.gz").read_bytes()
    broken = source / "day_1.gz"
    broken.write_bytes(whole[:-2000] + b"\0" * 2000)
    os.utime(broken, (1, 1))
    assert "day_1.gz" in error_line(capsys, "--input", str(source), "--output", str(tmp_path / "out"))
    finished = tmp_path / "out" / "day_0_labels.npy"
    assert finished.exists()
    assert not list((tmp_path / "out").glob("day_[12]*"))
    before = finished.stat().st_mtime_ns
    broken.write_bytes(whole)  # same name, size and time: a repaired file counts as the same input
    os.utime(broken, (1, 1))
    assert preprocess(source, tmp_path / "out") == 0
    assert finished.stat().st_mtime_ns == before, "a complete day was written again"
    assert len(day(tmp_path / "out", 2, "labels")) == 299


def test_ctrl_c_leaves_no_partial_day_and_the_same_command_resumes(tmp_path: Path) -> None:
    for number in range(3):
        write_clicks(tmp_path / f"day_{number}", 150_000, seed=number)
    command = ["preprocess", "--input", str(tmp_path), "--output", str(tmp_path / "out"), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *command], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()  # the first day is complete, two are missing
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert '"day": 0' in first
    assert process.returncode == 130, error
    assert error == "interrupted; the same command continues with the unfinished files\n"
    out = tmp_path / "out"
    assert not (out / "_COMPLETE.json").exists()
    for path in out.glob("day_*.npy"):
        assert len(np.load(path)) == 150_000, f"{path.name} is incomplete"
    before = (out / "day_0_dense.npy").stat().st_mtime_ns
    ended = trainer(*command)
    assert ended.returncode == 0, ended.stderr
    assert (out / "day_0_dense.npy").stat().st_mtime_ns == before
    assert json.loads((out / "_COMPLETE.json").read_text())["rows"] == 450_000


def test_a_second_process_does_not_write_to_the_same_folder(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    (tmp_path / "out" / ".staging").mkdir(parents=True)
    with (tmp_path / "out" / ".staging" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = error_line(capsys, "--input", str(days), "--output", str(tmp_path / "out"))
    assert "another preprocess is writing to" in message


# --- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import re, sys
from pathlib import Path
from trainer.main import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1], file=sys.stderr)
sys.exit(code)
"""  # not getrusage: its peak includes the parent's memory at the fork


@pytest.mark.parametrize("options", [["--ids", "raw"], ["--ids", "frequency", "--shuffle", "--format", "parquet"]])
def test_memory_does_not_grow_with_the_input(options: list[str], tmp_path: Path) -> None:
    write_clicks(tmp_path / "some", 100_000)
    peaks = []
    for copies in (1, 6):
        source = tmp_path / f"train_{copies}" / "train.txt"
        source.parent.mkdir()
        source.write_bytes((tmp_path / "some").read_bytes() * copies)
        command = ["preprocess", "--input", str(source), "--output", str(tmp_path / f"out{copies}"), *options]
        ended = subprocess.run(
            [sys.executable, "-c", MEASURE, *command, "--memory-gib", "1"],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(ended.stderr.split()[-1]) * 1024)
        size = source.stat().st_size
    assert peaks[1] < 2**30, f"--memory-gib 1 was exceeded: {peaks[1] / 2**20:.0f} MiB"
    assert peaks[1] - peaks[0] < size, f"an input of {size} bytes took {peaks} bytes"


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "the following arguments are required: --input, --output"),
        (["--ids", "hash"], "--ids hash needs --rows: got none"),
        (["--rows", "10"], "--rows does not apply: got --ids raw; allowed: --ids hash"),
        (["--ids", "hash", "--rows", "1,2"], "--rows: got '1,2'; allowed: one number below 2**31, or 26 of them"),
        (["--memory-gib", "0.5"], "--memory-gib is too small: got 0.5; allowed: 1 or more"),
        (["--formt", "npy"], "unknown option --formt (did you mean --format?)"),
        (["--days", "5"], "got [5]; allowed: [0, 1, 2]"),
        (["--workers", "0"], "--workers: got '0'; allowed: an integer of 1 or more"),
    ],
)
def test_a_user_mistake_is_reported_in_one_line(
    arguments: list[str], part: str, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--input", str(days), "--output", str(tmp_path / "out")] if arguments else []
    assert part in error_line(capsys, *both, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("uri", "part"),
    [
        ("nowhere/at/all", "no such bucket, folder or file"),
        ("gopher://x/y", "cannot be opened"),
        ("EMPTY", "with no files; allowed: day_N, day_N.gz, or train.txt"),
    ],
)
def test_a_missing_input_is_reported(uri: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path) if uri == "EMPTY" else uri
    message = error_line(capsys, "--input", uri, "--output", str(tmp_path / "out"))
    assert "--input" in message
    assert uri in message
    assert part in message


def test_a_folder_with_other_files_is_not_written_to(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "day_0_dense.npy").write_bytes(b"mine")
    message = error_line(capsys, "--input", str(days), "--output", str(tmp_path))
    assert "has files that this command did not write: got day_0_dense.npy. Fix: name an empty folder" in message


def test_the_command_refuses_to_run_in_several_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "preprocess runs in one process with threads" in error_line(
        capsys, "--input", "x", "--output", str(tmp_path)
    )


def test_options_can_come_from_a_file(days: Path, tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    tree = {"input": str(days), "output": str(tmp_path / "out"), "ids": "hash", "rows": [7] * 26, "shuffle": False}
    file.write_text(json.dumps(tree | {"format": "parquet"}))
    assert main(["preprocess", "--config", str(file), "--format", "npy", "--days", "0,2"]) == 0
    assert day(tmp_path / "out", 2, "sparse").max() < 7


def test_a_full_disk_is_reported_and_the_next_run_resumes(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(output_module, "_sync", full)
        message = error_line(capsys, "--input", str(clicks), "--output", str(tmp_path / "out"))
    assert f"--output {tmp_path / 'out'}: the disk is full. Fix: free some space" in message
    assert not list((tmp_path / "out").glob("day_*"))
    assert preprocess(clicks, tmp_path / "out") == 0
    assert len(day(tmp_path / "out", 6, "labels")) == 714
