"""The fetch command: complete files, resumed copies and one-line errors."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from small_jobs import ROOT, environment, trainer

from trainer.main import main
from trainer.storage import fetch as fetch_module
from trainer.storage import retry
from trainer.storage.retry import RetryPolicy


class OddStore(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store on this disk with injected errors."""

    protocol = "odd"
    cachable = False
    faults: ClassVar[dict[str, list[BaseException]]] = {}  # by file name, one per attempt
    attempts: ClassVar[list[str]] = []
    listing: ClassVar[list[BaseException]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("odd://"))

    def find(self, path: str, **options: Any) -> Any:
        if self.listing:
            raise self.listing[0]
        return super().find(path, **options)

    def get_file(self, path1: str, path2: Any, callback: Any = None, **options: Any) -> None:
        name = Path(path1).name
        with self.lock:
            self.attempts.append(name)
            fault = self.faults[name].pop(0) if self.faults.get(name) else None
        if fault is not None:
            Path(path2).write_bytes(Path(path1).read_bytes()[: Path(path1).stat().st_size // 2])
            callback.relative_update(7)
            raise fault
        super().get_file(path1, path2, callback=callback, **options)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[OddStore]:
    fsspec.register_implementation("odd", OddStore, clobber=True)
    monkeypatch.setattr(OddStore, "faults", {})
    monkeypatch.setattr(OddStore, "attempts", [])
    monkeypatch.setattr(OddStore, "listing", [])
    monkeypatch.setattr(retry, "STORE_RETRY", RetryPolicy(first_delay_seconds=0.001))
    return OddStore


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with five files in three folders, one of them empty, 2.4 MB in total."""
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    for i, name in enumerate(("a.bin", "b.bin", "deep/c.bin", "deep/er/d.bin")):
        (folder / name).write_bytes(os.urandom(600_000 + i))
    (folder / "deep" / "empty").touch()
    return folder


def fetch(source: Path | str, target: Path, *options: str) -> int:
    return main(["fetch", "--from", f"odd://{source}", "--to", str(target), "--progress", "lines", *options])


def contents(folder: Path) -> dict[str, bytes]:
    """Return the copied files by name, without the files of the command itself."""
    own = {fetch_module.MARKER, fetch_module.MANIFEST}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in own]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["event"] == "result"
    return found


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    message = capsys.readouterr().err
    assert message.count("\n") == 1, f"one line, no stack trace: {message}"
    assert message.startswith("error: ")
    return message


def test_a_folder_is_copied_completely_with_a_marker(
    store: type[OddStore], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(source, tmp_path / "to", "--workers", "3") == 0
    assert contents(tmp_path / "to") == contents(source)
    marker = json.loads((tmp_path / "to" / "_FETCHED.json").read_text())
    assert marker == {"from": f"odd://{source}", "files": 5, "bytes": 2_400_006}
    found = result(capsys)
    assert (found["copied_files"], found["copied_bytes"]) == (5, 2_400_006)
    assert found["bytes_per_second"] > 0


def test_a_second_run_copies_only_what_has_changed(
    store: type[OddStore], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(source, tmp_path / "to") == 0
    (source / "deep" / "c.bin").write_bytes(b"x" * 600_002)  # the same size
    os.utime(source / "deep" / "c.bin", (5, 5))
    (tmp_path / "to" / "a.bin").write_bytes(b"damaged")
    store.attempts.clear()
    capsys.readouterr()
    assert fetch(source, tmp_path / "to") == 0
    assert sorted(store.attempts) == ["a.bin", "c.bin"]
    assert contents(tmp_path / "to") == contents(source)
    assert result(capsys)["copied_files"] == 2


def test_a_transient_error_is_retried(store: type[OddStore], source: Path, tmp_path: Path) -> None:
    store.faults["b.bin"] = [ConnectionResetError("reset"), TimeoutError("slow"), EOFError("short")]
    assert fetch(source, tmp_path / "to", "--retries", "3") == 0
    assert store.attempts.count("b.bin") == 4
    assert contents(tmp_path / "to") == contents(source)


def test_a_permanent_error_ends_with_one_line_and_the_next_run_resumes(
    store: type[OddStore], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.faults["b.bin"] = [ConnectionResetError("the line is dead")] * 3
    assert fetch(source, tmp_path / "to", "--retries", "2", "--workers", "1") == 2
    message = error_line(capsys)
    assert "b.bin could not be copied in 3 attempts: ConnectionResetError: the line is dead" in message
    to = tmp_path / "to"
    assert not (to / "_FETCHED.json").exists(), "the marker was written before the files"
    assert set(contents(to)) == {"a.bin"}, "half a file was left"
    store.attempts.clear()
    assert fetch(source, to) == 0
    assert "a.bin" not in store.attempts, "a finished file was copied again"
    assert contents(to) == contents(source)


def test_a_truncated_file_is_copied_again(
    store: type[OddStore], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_file = OddStore.get_file

    def short_once(self: OddStore, path1: str, path2: Any, **options: Any) -> None:
        get_file(self, path1, path2, **options)
        if store.attempts.count("a.bin") == 1 and path1.endswith("a.bin"):
            os.truncate(path2, 1_000)

    monkeypatch.setattr(OddStore, "get_file", short_once)
    assert fetch(source, tmp_path / "to") == 0
    assert store.attempts.count("a.bin") == 2
    assert contents(tmp_path / "to") == contents(source)


class NoCredentialsError(Exception):
    """An error with the name that botocore uses."""


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (NoCredentialsError("Unable to locate credentials"), "found no credentials for this store"),
        (
            PermissionError("Access Denied"),
            "access is denied (Access Denied). Fix: give this identity permission to read it",
        ),
        (FileNotFoundError("The specified bucket does not exist"), "no such bucket, folder or file"),
        (ConnectionError("no route"), "cannot be read: ConnectionError: no route"),
    ],
)
def test_an_error_of_the_store_is_reported(
    fault: Exception, part: str, store: type[OddStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.listing.append(fault)
    assert fetch("/bucket/x", tmp_path / "to") == 2
    message = error_line(capsys)
    assert "--from odd:///bucket/x" in message
    assert part in message
    assert not (tmp_path / "to").exists(), "a folder was created although nothing was copied"


def test_an_empty_prefix_is_refused(store: type[OddStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nothing").mkdir()
    assert fetch(tmp_path / "nothing", tmp_path / "to") == 2
    assert "no such bucket or folder, or it is empty. Fix: check the name" in error_line(capsys)


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the quota is used")])
def test_a_full_disk_is_reported_and_not_retried(
    number: int, words: str, store: type[OddStore], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.faults["a.bin"] = [OSError(number, os.strerror(number))] * 9
    assert fetch(source, tmp_path / "to") == 2
    assert f"--to {tmp_path / 'to'}: {words}" in error_line(capsys)
    assert store.attempts.count("a.bin") == 1
    assert "a.bin.part" not in contents(tmp_path / "to"), "half a file fills the disk"


def test_too_little_space_is_reported_before_anything_is_copied(
    store: type[OddStore],
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = fetch_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda _: real._replace(free=2_000_000))
    assert fetch(source, tmp_path / "to") == 2
    assert "is too small: got 0.0 GB free; needed: 0.0 GB" in error_line(capsys)
    assert not store.attempts


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--from", "x"], "the following arguments are required: --to"),
        (["--from", "gopher://x", "--to", "y"], "--from gopher://x cannot be opened"),
        (["--from", "x", "--to", "y", "--workers", "0"], "--workers: got '0'; allowed: an integer of 1 or more"),
        (["--from", "x", "--to", "y", "--worker", "3"], "unknown option --worker (did you mean --workers?)"),
    ],
)
def test_a_wrong_option_is_refused(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", *arguments]) == 2
    assert part in error_line(capsys)


def test_a_target_that_is_a_file_or_read_only_is_refused(
    store: type[OddStore], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch(source, source / "a.bin") == 2
    assert f"--to {source / 'a.bin'} is a file; allowed: a folder" in error_line(capsys)
    assert fetch(source, Path("/proc/nowhere")) == 2
    assert "--to /proc/nowhere is not writable" in error_line(capsys)


SLOW = """
import sys, time, fsspec
from fsspec.implementations.local import LocalFileSystem
from trainer.main import main
class Slow(LocalFileSystem):
    protocol = "slow"
    def get_file(self, path1, path2, callback=None, **options):
        if path1.endswith("b.bin"):
            open(path2, "wb").write(b"half")
            print("under way", flush=True)
            while True:
                callback.relative_update(0)
                time.sleep(0.01)
        super().get_file(path1, path2, callback=callback, **options)
    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("slow://"))
fsspec.register_implementation("slow", Slow)
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_leaves_no_partial_file_and_the_same_command_resumes(source: Path, tmp_path: Path) -> None:
    command = ["fetch", "--from", f"slow://{source}", "--to", str(tmp_path / "to"), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *command], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "interrupted; the same command continues with the missing files\n"
    assert set(contents(tmp_path / "to")) == {"a.bin"}
    ended = trainer("fetch", "--from", str(source), "--to", str(tmp_path / "to"))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["copied_files"] == 4
    assert contents(tmp_path / "to") == contents(source)
