"""The preprocess command: parse, number, shuffle, write; whatever is finished stays finished."""

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
from trainer.preprocess.output import MARKER, Days
from trainer.preprocess.rows import Convert, Shuffled, Span
from trainer.preprocess.staging import Stage
from trainer.runtime.malloc import keep_small_buffers
from trainer.storage.atomic_write import write_json
from trainer.storage.remote_errors import disk_error

_GIB = 2**30
_FIXED_BYTES = int(0.6 * _GIB)  # the libraries, a bucket of the shuffle or a chunk of a vocabulary
_WORKER_BYTES = 48 << 20  # some blocks of 16,384 rows under way, or some chunks of text


def preprocess_main(arguments: Sequence[str]) -> int:
    """`preprocess --input PATH --output DIR [...]`; 0 when all days are in place."""
    options = read_options(arguments)
    job, began = Preprocess(options), time.monotonic()
    try:
        marker = job.run()
        job.tell(marker, time.monotonic() - began)
    except OSError as error:
        told = disk_error(error, options.output, "--output")
        if told is None:
            raise
        raise told from error
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
        """Make what is missing; returns the marker's contents."""
        keep_small_buffers()
        inputs = find_inputs(self.options)
        wanted = {"options": self.options.decisive(), "inputs": [source.identity for source in inputs]}
        done = _finished(self.output, wanted)
        if done is not None:
            self.progress.event("skipped", f"{self.output} was complete already", output=str(self.output))
            return done
        self.staging.mkdir(parents=True, exist_ok=True)
        with _alone(self.staging):
            _same_plan(self.staging / "plan.json", wanted, self.output)
            days = [day for source in inputs for day in source.days]
            eval_day = days[-1] if len(days) > 1 else None
            with Days(self.output, self.staging, self.options.format, eval_day, self.workers) as finished:
                self._write_days(inputs, finished)
            marker = self._complete(inputs, finished, days, wanted)
        return marker

    def _write_days(self, inputs: Sequence[Input], finished: Days) -> None:
        together = self.options.shuffle or self.options.ids == "frequency"
        for group in [inputs] if together else [[source] for source in inputs]:
            if all(finished.facts(day) for source in group for day in source.days):
                continue
            spans = [span for source in group for span in self._parsed(source)]
            if self.options.ids == "frequency":
                self._number([self._stage(source) for source in group])
            training = spans[:-1] if self.options.shuffle and len(spans) > 1 else []
            shuffled = self._scattered(training) if training else None
            self._write(spans, finished, shuffled, {span.day for span in training})
            finished.settle()
            for source in group:
                self._facts(source)  # kept for the summary
                self._stage(source).remove()

    def _stage(self, source: Input) -> Stage:
        return Stage(self.staging / f"file_{source.days[0]}")

    def _facts(self, source: Input) -> dict[str, Any]:
        """What is known of a parsed file, which outlives its columns."""
        kept = self.staging / f"file_{source.days[0]}.json"
        if kept.exists():
            found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            return found
        found = self._stage(source).facts or {}
        write_json(kept, found)
        return found

    def _parsed(self, source: Input) -> list[Span]:
        """The days of a file, parsed."""
        stage = self._stage(source)
        if stage.facts is None:
            with self.progress.task(f"parsing {source.name}", source.size or None, "bytes") as task:
                stage.fill(source, self.options.bad_rows == "skip", self.workers, task)
        rows = int((stage.facts or {})["rows"])
        if rows < len(source.days):
            raise UserError(f"{source.uri} has {rows} rows, fewer than --cut-days {len(source.days)}; give fewer days")
        size, longer = divmod(rows, len(source.days))
        ends = np.cumsum([size + (i < longer) for i in range(len(source.days))]).tolist()
        return [
            Span(day, stage, start, end) for day, start, end in zip(source.days, [0, *ends[:-1]], ends, strict=True)
        ]

    def _number(self, stages: list[Stage]) -> None:
        from trainer.preprocess.vocabulary import number_feature

        total = 2 * CRITEO_NUM_SPARSE * sum((stage.facts or {})["rows"] for stage in stages)
        with self.progress.task("numbering ids", total, "ids") as task:
            for feature in range(CRITEO_NUM_SPARSE):
                keep = self.output / "vocabulary" / f"cat_{feature}.npy"
                number_feature(stages, feature, self.options.threshold, keep, self.memory, self.workers, task)

    def _scattered(self, training: list[Span]) -> Shuffled:
        shuffled = Shuffled(self.staging / "buckets", training, self.options.seed, self.options.ids == "raw")
        with self.progress.task("shuffling", sum(span.size for span in training), "rows") as task:
            shuffled.scatter(self.convert, task)
        return shuffled

    def _write(self, spans: list[Span], finished: Days, shuffled: Shuffled | None, training: set[int]) -> None:
        left = [span for span in spans if not finished.facts(span.day)]
        for span in left:
            with self.progress.task(f"writing day {span.day}", span.size, "rows") as task:
                use_order = shuffled is not None and span.day in training
                parts = shuffled.parts(span.day) if shuffled and use_order else self.convert.parts(span)
                told = partial(self._tell_day, span)
                finished.write(span.day, span.size, parts, task, told)

    def _tell_day(self, span: Span) -> None:
        self.progress.event("day", f"day {span.day}: {span.size:,} rows", day=span.day, rows=span.size)

    def _complete(
        self, inputs: Sequence[Input], finished: Days, days: list[int], wanted: dict[str, Any]
    ) -> dict[str, Any]:
        """Write train.json, then the marker, then clean up."""
        facts = {day: finished.facts(day) or {} for day in days}
        files = [self._facts(source) for source in inputs]
        largest = np.max([facts[day]["max_ids"] for day in days], axis=0)
        rows_per_feature = list(self.options.rows) or (largest + 1).tolist()
        if self.options.ids == "frequency":
            names = [self.output / "vocabulary" / f"cat_{f}.npy" for f in range(CRITEO_NUM_SPARSE)]
            rows_per_feature = [int(np.load(name, mmap_mode="r").size) + 2 for name in names]
        marker = wanted | {
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

    def tell(self, marker: dict[str, Any], seconds: float) -> None:
        """Report the end of the command."""
        bad = f", {marker['bad_rows']:,} malformed rows left out" if marker["bad_rows"] else ""
        text = (
            f"{marker['rows']:,} rows in {len(marker['days'])} days in {seconds:,.1f} s "
            f"({marker['rows'] / seconds:,.0f} rows/s){bad}; train on them with\n"
            f"  python -m trainer --config {self.output / 'train.json'}"
        )
        more = {"output": str(self.output), "seconds": round(seconds, 3)}
        self.progress.result(text, **{k: v for k, v in marker.items() if k not in ("options", "inputs")}, **more)


def training_config(options: Options, output: Path, days: list[int], rows: list[int]) -> dict[str, Any]:
    """The trainer's options for this output. Raw ids are larger than any table: they are hashed or taken modulo."""
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


def _finished(output: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The marker of a complete output; raises UserError where the folder holds something else."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output is {output}, which is a file; name a folder")
    marker = output / MARKER
    if marker.exists():
        found: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))
        _compare(found, wanted, output)
        return found
    if not (output / ".staging" / "plan.json").exists():
        strange = [path.name for pattern in ("day_*", "train", "eval") for path in output.glob(pattern)]
        if strange:
            raise UserError(
                f"--output {output} holds {sorted(strange)[0]}, which this command did not write; name an empty folder"
            )
    return None


def _same_plan(path: Path, wanted: dict[str, Any], output: Path) -> None:
    if path.exists():
        _compare(json.loads(path.read_text(encoding="utf-8")), wanted, output)
    else:
        write_json(path, wanted)


def _compare(found: dict[str, Any], wanted: dict[str, Any], output: Path) -> None:
    """Raises UserError that names the first difference between two plans."""
    before, now = found["options"], json.loads(json.dumps(wanted["options"]))
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise UserError(
                f"--output {output} was begun with --{key.replace('_', '-')} {_shown(before.get(key))}, now it is "
                f"{_shown(now.get(key))}; give the same options, name another --output, or `rm -r {output}`"
            )
    for old, new in zip(found["inputs"], wanted["inputs"], strict=False):
        if old != json.loads(json.dumps(new)):
            raise UserError(
                f"{new['uri']} is not the file that --output {output} was begun with (size {old['size']}, now "
                f"{new['size']}); name another --output, or `rm -r {output}`"
            )
    if len(found["inputs"]) != len(wanted["inputs"]):
        raise UserError(
            f"--output {output} was begun with {len(found['inputs'])} files, now --input has {len(wanted['inputs'])}; "
            f"name another --output, or `rm -r {output}`"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def _alone(staging: Path) -> Iterator[None]:
    """Raises UserError where another process is at work in this folder."""
    with (staging / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another preprocess is writing to {staging.parent}; wait for its end, or name another --output"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise  # those three: a file system without locks, where nothing can be said about others
        yield
