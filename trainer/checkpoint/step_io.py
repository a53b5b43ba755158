"""DCP's (torch.distributed.checkpoint) writer and reader of one step: retried, checksummed and verified."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, TypeVar

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _write_files_from_queue
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from trainer.checkpoint.checksums import FileChecksums
from trainer.checkpoint.files import CheckedFiles
from trainer.checkpoint.requests import retry_request
from trainer.storage.retry import RetryPolicy

T = TypeVar("T")
_UPLOADS = 4  # files per process that are uploaded to an object store in parallel, each as a multipart upload


class StepWriter(FileSystemWriter):
    """DCP's writer of one step: checksums every file, and retries a failed write of this process's share."""

    def __init__(self, folder: str, files: CheckedFiles, local: bool, retry: RetryPolicy) -> None:
        super().__init__(folder, sync_files=local, thread_count=1 if local else _UPLOADS)
        self.fs = files  # type: ignore[assignment]  # annotated as FileSystem, but any FileSystemBase works
        self.path = folder
        self._folder, self._files, self._retry = folder, files, retry

    @property
    def written(self) -> dict[str, FileChecksums]:
        """Return the checksums of the files that this process wrote, by name."""
        return self._files.written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder; see StorageWriter."""
        prepare = super().prepare_local_plan
        return retry_request(f"creating {self._folder}", lambda: prepare(plan), self._retry)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's share; see StorageWriter."""
        return retry_request(f"writing to {self._folder}", lambda: self._write_once(plan, planner), self._retry)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata file; see StorageWriter."""
        finish = super().finish
        retry_request(f"writing {self._folder}/.metadata", lambda: finish(metadata, results), self._retry)

    def _write_once(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with_crc = get_crc32_options()
        set_crc32_options(False)  # torch.save's own checksum is slower than ours, and torch never verifies it
        try:
            written = super().write_data(plan, planner)
        finally:
            set_crc32_options(with_crc)
        assert len(written.wait()) == len(plan.items), "a tensor was not written, and no error was raised"
        return written

    def _write_data(self, planner: SavePlanner, file_queue: Queue[Any]) -> Future[list[WriteResult]]:
        """Write files from threads and raise their errors; the base class drops all but the first thread's errors."""
        results: Queue[list[WriteResult]] = Queue()
        settings = (self.transforms, self.per_thread_copy_ahead, self.sync_files, self.thread_count)
        order = (self.fs.create_stream, file_queue, results, planner, *settings, self.serialization_format)
        with ThreadPoolExecutor(self.thread_count, "checkpoint-upload") as pool:
            for thread in [pool.submit(_write_files_from_queue, *order) for _ in range(self.thread_count)]:
                thread.result()
        written: Future[list[WriteResult]] = Future()
        written.set_result([result for part in _drain(results) for result in part])
        return written


def _drain(queue: Queue[T]) -> Iterator[T]:
    """Yield the items of a queue that is no longer filled."""
    while not queue.empty():
        yield queue.get()


class StepReader(FileSystemReader):
    """DCP's reader of one step, through verified files."""

    def __init__(self, folder: str, files: CheckedFiles) -> None:
        super().__init__(folder)
        self.fs = files  # type: ignore[assignment]  # see StepWriter
        self.path = folder
