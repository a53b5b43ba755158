"""Checkpoints past the page cache: the same bytes as by the usual way on every file system, and none of them cached."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import alone, checkpointer, config_of

from trainer.checkpoint import Progress, files
from trainer.checkpoint.direct import DirectFile
from trainer.sharding.sharded_model import build_sharded_model

MIB = 1024**2
LIMITED = """
import resource, sys
from trainer.checkpoint.direct import DirectFile
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 1024**2 + 100,) * 2)
file = DirectFile(sys.argv[1])
file.write(bytes(9 * 1024**2))
"""


def pattern(count: int) -> bytes:
    """Bytes of which no two pages are alike."""
    return b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(-(-count // 32)))[:count]


def cached(path: Path) -> bool:
    """Whether the kernel could read the file's first page without the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def takes_direct_io(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


@pytest.mark.parametrize("size", [0, 1, 4095, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17])
def test_a_file_holds_what_was_written_in_whatever_pieces(tmp_path: Path, size: int) -> None:
    data = pattern(size)
    for number, piece in enumerate((1 + size // 7, size + 1)):
        path = tmp_path / str(number)
        with DirectFile(str(path)) as file:
            for start in range(0, size, piece):
                assert file.write(data[start : start + piece]) == len(data[start : start + piece])
        assert path.read_bytes() == data


def test_what_is_written_after_a_sync_follows_it(tmp_path: Path) -> None:
    data = pattern(11 * MIB)
    with DirectFile(str(tmp_path / "x")) as file:
        file.write(memoryview(data)[: 5 * MIB])
        os.fsync(file.fileno())
        assert (tmp_path / "x").read_bytes() == data[: 5 * MIB], "fsync would have left bytes in our buffer"
        file.write(memoryview(data)[5 * MIB :])
    assert (tmp_path / "x").read_bytes() == data


def test_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    if not takes_direct_io(tmp_path):
        pytest.skip("the file system of pytest's folder has no O_DIRECT")
    data = pattern(8 * MIB)
    with DirectFile(str(tmp_path / "direct")) as file:
        file.write(data)
    (tmp_path / "usual").write_bytes(data)
    assert cached(tmp_path / "usual"), "the check itself sees nothing"
    assert not cached(tmp_path / "direct")


def test_a_file_system_without_direct_io_is_written_as_usual() -> None:
    memory = Path("/dev/shm")  # a tmpfs
    if not memory.is_dir():
        pytest.skip("no /dev/shm")
    path = memory / f"test-direct-{os.getpid()}"
    try:
        with DirectFile(str(path)) as file:
            file.write(pattern(5 * MIB))
        assert path.read_bytes() == pattern(5 * MIB)
    finally:
        path.unlink(missing_ok=True)


def test_a_file_system_that_takes_the_flag_and_refuses_the_write_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, refused = os.write, []

    def picky(descriptor: int, data: memoryview) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return written(descriptor, data)

    if not takes_direct_io(tmp_path):
        pytest.skip("the file system of pytest's folder has no O_DIRECT")
    monkeypatch.setattr(os, "write", picky)
    with DirectFile(str(tmp_path / "x")) as file:
        file.write(pattern(9 * MIB))
    monkeypatch.undo()
    assert refused == [4 * MIB], "it asked again and again"
    assert (tmp_path / "x").read_bytes() == pattern(9 * MIB)


def test_a_full_disk_is_an_error_and_the_file_is_given_back() -> None:
    file = DirectFile("/dev/full")
    descriptor = file.fileno()
    with pytest.raises(OSError, match="No space left on device"):
        file.write(bytes(5 * MIB))
    with pytest.raises(OSError, match="No space left on device"):
        file.close()
    assert file.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_last_bytes_that_do_not_fit_are_an_error_too() -> None:
    file = DirectFile("/dev/full")
    file.write(b"x")
    with pytest.raises(OSError, match="No space left on device"):
        file.close()


def test_a_write_that_is_cut_short_goes_on_to_the_byte_and_tells_why_it_ended(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "x")], capture_output=True, text=True, check=False
    )
    assert "File too large" in ended.stderr, ended.stderr
    assert (tmp_path / "x").stat().st_size == 5 * MIB + 100
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5 * MIB + 100, "the limit was set here"


def test_a_checkpoint_is_the_same_with_the_page_cache_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Counted(DirectFile):
        def __init__(self, path: str) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(files, "DirectFile", Counted)
    sums = {}
    for name, direct in (("direct", True), ("usual", False)):
        config = config_of(tmp_path / name, {"checkpoint.direct_io": direct})
        with alone(config) as runtime:
            checkpointer(build_sharded_model(config, runtime)).save(Progress(3, 24))
        shares = sorted((tmp_path / name).rglob("*.distcp"))
        sums[name] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in shares]
    assert sums["direct"] == sums["usual"] != []
    assert opened, "the fast way was not taken"
    assert not [path for path in opened if path.startswith(str(tmp_path / "usual"))], "the option changes nothing"
