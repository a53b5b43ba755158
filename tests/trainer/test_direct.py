"""Direct I/O writes the same bytes as ordinary I/O on every file system, and caches none of them."""

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
    """Return bytes in which no two pages are equal."""
    return b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(-(-count // 32)))[:count]


def cached(path: Path) -> bool:
    """Return whether the file's first page is in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def supports_direct_io(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


@pytest.mark.parametrize("size", [0, 1, 4095, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17])
def test_a_file_has_the_written_bytes_for_any_size_of_pieces(tmp_path: Path, size: int) -> None:
    data = pattern(size)
    for number, piece in enumerate((1 + size // 7, size + 1)):
        path = tmp_path / str(number)
        with DirectFile(str(path)) as file:
            for start in range(0, size, piece):
                assert file.write(data[start : start + piece]) == len(data[start : start + piece])
        assert path.read_bytes() == data


def test_bytes_written_after_a_sync_are_appended(tmp_path: Path) -> None:
    data = pattern(11 * MIB)
    with DirectFile(str(tmp_path / "x")) as file:
        file.write(memoryview(data)[: 5 * MIB])
        os.fsync(file.fileno())
        assert (tmp_path / "x").read_bytes() == data[: 5 * MIB], "bytes in our buffer would not have been synced"
        file.write(memoryview(data)[5 * MIB :])
    assert (tmp_path / "x").read_bytes() == data


def test_the_page_cache_is_not_used(tmp_path: Path) -> None:
    if not supports_direct_io(tmp_path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    data = pattern(8 * MIB)
    with DirectFile(str(tmp_path / "direct")) as file:
        file.write(data)
    (tmp_path / "usual").write_bytes(data)
    assert cached(tmp_path / "usual"), "the check does not notice cached files"
    assert not cached(tmp_path / "direct")


def test_a_file_system_without_direct_io_is_written_through_the_page_cache() -> None:
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


def test_a_file_system_that_accepts_the_flag_but_refuses_the_write_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, refused = os.write, []

    def picky(descriptor: int, data: memoryview) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return written(descriptor, data)

    if not supports_direct_io(tmp_path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    monkeypatch.setattr(os, "write", picky)
    with DirectFile(str(tmp_path / "x")) as file:
        file.write(pattern(9 * MIB))
    monkeypatch.undo()
    assert refused == [4 * MIB], "direct writes were attempted again"
    assert (tmp_path / "x").read_bytes() == pattern(9 * MIB)


def test_a_full_disk_raises_an_error_and_the_file_is_closed() -> None:
    file = DirectFile("/dev/full")
    descriptor = file.fileno()
    with pytest.raises(OSError, match="No space left on device"):
        file.write(bytes(5 * MIB))
    with pytest.raises(OSError, match="No space left on device"):
        file.close()
    assert file.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_full_disk_at_close_raises_an_error() -> None:
    file = DirectFile("/dev/full")
    file.write(b"x")
    with pytest.raises(OSError, match="No space left on device"):
        file.close()


def test_a_short_write_is_continued_and_then_raises_its_error(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "x")], capture_output=True, text=True, check=False
    )
    assert "File too large" in ended.stderr, ended.stderr
    assert (tmp_path / "x").stat().st_size == 5 * MIB + 100
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5 * MIB + 100, "the limit was set in this process"


def test_a_checkpoint_is_the_same_with_direct_io_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert opened, "direct I/O was not used"
    assert not [path for path in opened if path.startswith(str(tmp_path / "usual"))], "the option has no effect"
