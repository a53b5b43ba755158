"""The `preprocess` command: parse, number ids, shuffle and write; completed work is kept when it is interrupted."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.cli.progress import JobProgress
from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE
from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK
from trainer.preprocess.inputs import Input, find_inputs
from trainer.preprocess.options import Options, read_options
from trainer.preprocess.output import MARKER, OutputDays
from trainer.preprocess.rows import Convert, Shuffled, Span
from trainer.preprocess.staging import Stage
from trainer.runtime.malloc import keep_small_buffers
from trainer.storage.atomic_write import write_json
from trainer.storage.remote_errors import disk_error

_GIB = 2**30
_FIXED_BYTES = int(0.6 * _GIB)  # the libraries, and a bucket of the shuffle or a chunk of a vocabulary
_WORKER_BYTES = 48 << 20  # per worker: a few blocks of 16,384 rows, or a few chunks of text


def preprocess_main(arguments: Sequence[str]) -> int:
    """Run `preprocess --input PATH --output DIR [...]`; return 0 when all days are complete."""
    options = read_options(arguments)
    job, began = Preprocess(options), time.monotonic()
    try:
        marker = job.run()
        job.report(marker, time.monotonic() - began)
    except OSError as error:
        user_error = disk_error(error, options.output, "--output")
        if user_error is None:
            raise
        raise user_error from error
    return EXIT_OK


class Preprocess:
    """One run over all inputs."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.output = Path(options.output)
        self.staging = self.output / ".staging"
        self.progress = JobProgress(options.progress)
        self.memory = int(options.memory_gib * _GIB) - _FIXED_BYTES
        self.workers = max(1, min(options.workers, self.memory // _WORKER_BYTES))
        self.convert = Convert(options.rows, self.workers)

    def run(self) -> dict[str, Any]:
        """Write the missing days and return the contents of the marker."""
        keep_small_buffers()
        inputs = find_inputs(self.options)
        plan = {"options": self.options.for_result(), "inputs": [source.identity for source in inputs]}
        complete = _read_marker(self.output, plan)
        if complete is not None:
            self.progress.event("skipped", f"{self.output} is already complete", output=str(self.output))
            return complete
        self.staging.mkdir(parents=True, exist_ok=True)
        with _lock(self.staging):
            _check_plan(self.staging / "plan.json", plan, self.output)
            days = [day for source in inputs for day in source.days]
            eval_day = days[-1] if len(days) > 1 else None
            with OutputDays(self.output, self.staging, self.options.format, eval_day, self.workers) as output:
                self._write_days(inputs, output)
            marker = self._complete(inputs, output, days, plan)
        return marker

    def _write_days(self, inputs: Sequence[Input], output: OutputDays) -> None:
        together = self.options.shuffle or self.options.ids == "frequency"
        for group in [inputs] if together else [[source] for source in inputs]:
            if all(output.facts(day) for source in group for day in source.days):
                continue
            spans = [span for source in group for span in self._parse(source)]
            if self.options.ids == "frequency":
                self._number_ids([self._stage(source) for source in group])
            training = spans[:-1] if self.options.shuffle and len(spans) > 1 else []
            shuffled = self._shuffle(training) if training else None
            self._write(spans, output, shuffled, {span.day for span in training})
            output.wait()
            for source in group:
                self._facts(source)  # the summary needs them after the stage is removed
                self._stage(source).remove()

    def _stage(self, source: Input) -> Stage:
        return Stage(self.staging / f"file_{source.days[0]}")

    def _facts(self, source: Input) -> dict[str, Any]:
        """Return the facts about a parsed file, which are kept longer than its columns."""
        path = self.staging / f"file_{source.days[0]}.json"
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        found = self._stage(source).facts or {}
        write_json(path, found)
        return found

    def _parse(self, source: Input) -> list[Span]:
        """Parse a file and return its days."""
        stage = self._stage(source)
        if stage.facts is None:
            with self.progress.task(f"parsing {source.name}", source.size or None, "bytes") as task:
                stage.fill(source, self.options.bad_rows == "skip", self.workers, task)
        rows = int((stage.facts or {})["rows"])
        if rows < len(source.days):
            raise UserError(
                f"{source.uri} has fewer rows than days: got {rows} rows with --cut-days {len(source.days)}. "
                f"Fix: use a smaller --cut-days"
            )
        size, longer = divmod(rows, len(source.days))
        ends = np.cumsum([size + (i < longer) for i in range(len(source.days))]).tolist()
        return [
            Span(day, stage, start, end) for day, start, end in zip(source.days, [0, *ends[:-1]], ends, strict=True)
        ]

    def _number_ids(self, stages: list[Stage]) -> None:
        from trainer.preprocess.vocabulary import number_feature

        total = 2 * CRITEO_NUM_SPARSE * sum((stage.facts or {})["rows"] for stage in stages)
        with self.progress.task("numbering ids", total, "ids") as task:
            for feature in range(CRITEO_NUM_SPARSE):
                path = self.output / "vocabulary" / f"cat_{feature}.npy"
                number_feature(stages, feature, self.options.threshold, path, self.memory, self.workers, task)

    def _shuffle(self, training: list[Span]) -> Shuffled:
        shuffled = Shuffled(self.staging / "buckets", training, self.options.seed, self.options.ids == "raw")
        with self.progress.task("shuffling", sum(span.size for span in training), "rows") as task:
            shuffled.scatter(self.convert, task)
        return shuffled

    def _write(self, spans: list[Span], output: OutputDays, shuffled: Shuffled | None, training: set[int]) -> None:
        missing = [span for span in spans if not output.facts(span.day)]
        for span in missing:
            with self.progress.task(f"writing day {span.day}", span.size, "rows") as task:
                if shuffled and span.day in training:
                    blocks = shuffled.lazy_blocks(span.day)
                else:
                    blocks = self.convert.lazy_blocks(span)
                output.write(span.day, span.size, blocks, task, partial(self._report_day, span))

    def _report_day(self, span: Span) -> None:
        self.progress.event("day", f"day {span.day}: {span.size:,} rows", day=span.day, rows=span.size)

    def _complete(
        self, inputs: Sequence[Input], output: OutputDays, days: list[int], plan: dict[str, Any]
    ) -> dict[str, Any]:
        """Write train.json, then the marker, then clean up."""
        facts = {day: output.facts(day) or {} for day in days}
        files = [self._facts(source) for source in inputs]
        largest = np.max([facts[day]["max_ids"] for day in days], axis=0)
        rows_per_feature = list(self.options.rows) or (largest + 1).tolist()
        if self.options.ids == "frequency":
            names = [self.output / "vocabulary" / f"cat_{f}.npy" for f in range(CRITEO_NUM_SPARSE)]
            rows_per_feature = [int(np.load(name, mmap_mode="r").size) + 2 for name in names]
        marker = plan | {
            "days": {str(day): facts[day]["rows"] for day in days},
            "rows": sum(facts[day]["rows"] for day in days),
            "bad_rows": sum(file["bad_rows"] for file in files),
            "bad_lines": [line for file in files for line in file["bad_lines"]][:10],
            "rows_per_feature": rows_per_feature,
        }
        write_json(self.output / "train.json", training_config(self.options, self.output, days, rows_per_feature))
        write_json(self.output / MARKER, marker)
        shutil.rmtree(self.staging, ignore_errors=True)
        return marker

    def report(self, marker: dict[str, Any], seconds: float) -> None:
        """Report the result of the command."""
        bad = f", {marker['bad_rows']:,} malformed rows skipped" if marker["bad_rows"] else ""
        text = (
            f"{marker['rows']:,} rows in {len(marker['days'])} days in {seconds:,.1f} s "
            f"({marker['rows'] / seconds:,.0f} rows/s){bad}; train on them with\n"
            f"  python -m trainer --config {self.output / 'train.json'}"
        )
        more = {"output": str(self.output), "seconds": round(seconds, 3)}
        self.progress.result(text, **{k: v for k, v in marker.items() if k not in ("options", "inputs")}, **more)


def training_config(options: Options, output: Path, days: list[int], rows: list[int]) -> dict[str, Any]:
    """Return the trainer's options for this output; raw ids exceed any table, so they are hashed or taken modulo."""
    raw = options.ids == "raw"
    model = {} if raw else {"model": {"num_embeddings": rows}}
    train, held_out = (days[:-1], days[-1:]) if len(days) > 1 else (days, [])
    if options.format == "npy":
        criteo = {"train_days": train, "eval_days": held_out, "modulo_ids": raw}
        return {"data": {"source": "criteo", "path": str(output.absolute()), "criteo": criteo}} | model
    columns = {
        "label": "label",
        "dense": [{"column": f"dense_{i}"} for i in range(CRITEO_NUM_DENSE)],
        "sparse": [{"column": f"cat_{i}", "hash": raw} for i in range(CRITEO_NUM_SPARSE)],
    }
    paths = {"path": str(output.absolute() / "train")}
    if held_out:
        paths["eval_path"] = str(output.absolute() / "eval")
    return {"data": {"source": "parquet", "parquet": columns} | paths} | model


def _read_marker(output: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the marker of a complete output, or None; raise UserError if the folder has other contents."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output is not a folder: got {output}. Fix: name a folder")
    marker = output / MARKER
    if marker.exists():
        found: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))
        _compare(found, plan, output)
        return found
    if not (output / ".staging" / "plan.json").exists():
        foreign = [path.name for pattern in ("day_*", "train", "eval") for path in output.glob(pattern)]
        if foreign:
            raise UserError(
                f"--output {output} has files that this command did not write: got {sorted(foreign)[0]}. "
                f"Fix: name an empty folder"
            )
    return None


def _check_plan(path: Path, plan: dict[str, Any], output: Path) -> None:
    if path.exists():
        _compare(json.loads(path.read_text(encoding="utf-8")), plan, output)
    else:
        write_json(path, plan)


def _compare(started: dict[str, Any], plan: dict[str, Any], output: Path) -> None:
    """Raise UserError for the first difference between the plan that was started and the current one."""
    before, now = started["options"], json.loads(json.dumps(plan["options"]))
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise UserError(
                f"--output {output} was started with --{key.replace('_', '-')} {_shorten(before.get(key))}: got "
                f"{_shorten(now.get(key))}. Fix: use the same options, another --output, or `rm -r {output}`"
            )
    for old, new in zip(started["inputs"], plan["inputs"], strict=False):
        if old != json.loads(json.dumps(new)):
            raise UserError(
                f"{new['uri']} has changed since --output {output} was started (size {old['size']}): got size "
                f"{new['size']}. Fix: use another --output, or `rm -r {output}`"
            )
    if len(started["inputs"]) != len(plan["inputs"]):
        raise UserError(
            f"--output {output} was started with {len(started['inputs'])} files: got {len(plan['inputs'])} in --input. "
            f"Fix: use another --output, or `rm -r {output}`"
        )


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def _lock(staging: Path) -> Iterator[None]:
    """Hold the lock of the folder; raise UserError if another process has it."""
    with (staging / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another preprocess is writing to {staging.parent}. Fix: wait until it ends, or use another --output"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise  # these three mean a file system without locks, where other processes cannot be noticed
        yield
