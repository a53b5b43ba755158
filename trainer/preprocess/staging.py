"""Parsed files on disk, column by column, as input for the final conversion.

That conversion needs facts about whole files: the smallest integer, which TorchRec's logarithm starts from, and the
counts of all ids.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.cli.progress import Task
from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE
from trainer.errors import UserError
from trainer.preprocess.inputs import Input, read_texts
from trainer.preprocess.ordered import in_order
from trainer.preprocess.parse import BadRow, parse
from trainer.storage.atomic_write import write_json

Array = npt.NDArray[Any]
_MAX_LISTED = 5  # malformed rows in the summary


class Stage:
    """A folder with dense.bin (N x 13 int32), labels.bin (N int32) and per feature cat_F.bin (N uint32)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marker = folder / "stage.json"

    @property
    def facts(self) -> dict[str, Any] | None:
        """Return rows, dense_min, bad_rows and bad_lines of a complete stage, or None for an incomplete one."""
        if not self._marker.exists():
            return None
        found: dict[str, Any] = json.loads(self._marker.read_text(encoding="utf-8"))
        return found

    def column(self, feature: int) -> Path:
        """Return the file of a feature's raw ids."""
        return self.folder / f"cat_{feature}.bin"

    def mapped(self, feature: int) -> Path:
        """Return the file of a feature's contiguous numbers (int32), which exists once there is a vocabulary."""
        return self.folder / f"cat_{feature}.mapped"

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def fill(self, source: Input, skip: bool, workers: int, task: Task) -> dict[str, Any]:
        """Parse the whole file and return its facts; raise UserError for a malformed row unless `skip`."""
        self.remove()
        self.folder.mkdir(parents=True)
        facts: dict[str, Any] = {"rows": 0, "dense_min": 2**31 - 1, "bad_rows": 0, "bad_lines": []}

        with ExitStack() as stack:
            files = {name: stack.enter_context((self.folder / name).open("wb")) for name in ("dense.bin", "labels.bin")}
            columns = [stack.enter_context(self.column(f).open("wb")) for f in range(CRITEO_NUM_SPARSE)]
            line = 1
            for rows, bad in in_order(parse, read_texts(source, task.advance), workers):
                _count_bad(facts, source, line, bad, skip)
                line += rows.labels.size + len(bad)
                files["dense.bin"].write(rows.dense.data)
                files["labels.bin"].write(rows.labels.data)
                for column, ids in zip(columns, rows.sparse, strict=True):
                    column.write(ids.data)
                facts["rows"] += rows.labels.size
                facts["dense_min"] = min(facts["dense_min"], int(rows.dense.min(initial=2**31 - 1)))
        if not facts["rows"]:
            raise UserError(f"{source.uri} has no rows. Fix: remove it from --input, or copy it again")
        write_json(self._marker, facts)
        return facts

    def dense(self, start: int, count: int) -> Array:
        """Read dense values, (count, 13) int32."""
        flat = self._read("dense.bin", np.int32, start * CRITEO_NUM_DENSE, count * CRITEO_NUM_DENSE)
        return flat.reshape(count, CRITEO_NUM_DENSE)

    def labels(self, start: int, count: int) -> Array:
        """Read labels, (count,) int32."""
        return self._read("labels.bin", np.int32, start, count)

    def ids(self, feature: int, start: int, count: int) -> Array:
        """Read ids: (count,) uint32, or int32 if there is a vocabulary."""
        mapped = self.mapped(feature)
        if mapped.exists():
            return self._read(mapped.name, np.int32, start, count)
        return self._read(self.column(feature).name, np.uint32, start, count)

    def _read(self, name: str, kind: Any, start: int, count: int) -> Array:
        array: Array = np.fromfile(self.folder / name, kind, count, offset=start * np.dtype(kind).itemsize)
        assert array.size == count, f"{self.folder / name} is shorter than its facts say"
        return array


def _count_bad(facts: dict[str, Any], source: Input, line: int, bad: list[BadRow], skip: bool) -> None:
    if bad and not skip:
        raise UserError(
            f"{source.uri} line {line + bad[0].number}: {bad[0].reason}. Fix: correct the file, or skip such rows with "
            f"--bad-rows skip"
        )
    facts["bad_rows"] += len(bad)
    room = _MAX_LISTED - len(facts["bad_lines"])
    facts["bad_lines"] += [f"{source.name} line {line + row.number}: {row.reason}" for row in bad[: max(room, 0)]]
