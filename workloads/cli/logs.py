"""`logs`: the logs of a run's pods, with the trainer's reports as columns on a terminal."""

from __future__ import annotations

import argparse
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.kube_api import KubeApiError, Object, api_path
from trainer.exit_codes import EXIT_FAILED, EXIT_OK
from workloads.cli.options import open_run
from workloads.errors import UserError
from workloads.runs.metrics import parse_event
from workloads.runs.pods import main_container, newest_pods, pod_index
from workloads.runs.run import Run

#: The columns of a report: heading, key, width and format.
_COLUMNS = (
    ("STEP", "step", 10, ",d"),
    ("LOSS", "loss", 8, ".4f"),
    ("NE", "ne", 8, ".4f"),
    ("AUC", "auc", 8, ".4f"),
    ("SAMPLES/S", "samples_per_second", 13, ",.0f"),
)
_ROWS_PER_HEADING = 40

#: The name of a pod, with a line of its log or the error that ended reading it.
PodLine = tuple[str, str | KubeApiError]


def logs_command(arguments: argparse.Namespace) -> int:
    """Print the logs; return 1 if the log of a pod cannot be read."""
    run = open_run(arguments)
    pods = select_pods(run, arguments.rank, arguments.pod)
    query = {"follow": "true" if arguments.follow else "", "previous": "true" if arguments.previous else ""}
    query["tailLines"] = "" if arguments.tail is None else str(arguments.tail)
    pretty = sys.stdout.isatty() if arguments.pretty is None else arguments.pretty
    formatter = ColumnFormatter() if pretty else PlainFormatter()
    failed = False
    for name, line in read_logs(run, pods, {key: value for key, value in query.items() if value}):
        if isinstance(line, KubeApiError):
            failed = True
            sys.stderr.write(f"{name}: {line}\n")
            continue
        prefix = f"{name}  " if len(pods) > 1 else ""
        for formatted in formatter.format(line):
            sys.stdout.write(f"{prefix}{formatted}\n")
        sys.stdout.flush()
    return EXIT_FAILED if failed else EXIT_OK


def select_pods(run: Run, rank: int | None, pod: str | None) -> list[Object]:
    """Return the pod with a name, the newest pod of an index (`rank`), or the newest pods of the run."""
    _, job = run.get_job()
    pods = run.list_pods()
    if pod is not None:
        found = [item for item in pods if item["metadata"]["name"] == pod]
        names = ", ".join(str(item["metadata"]["name"]) for item in pods) or "none"
        if not found:
            raise UserError(f"run {run.name!r} has no such pod: got --pod {pod!r}; allowed: {names}")
        return found
    newest = newest_pods(pods, str(job["metadata"]["name"]))
    if not newest:
        raise UserError(f"run {run.name!r} has no pods. The reason: python -m workloads status {run.options}")
    if rank is None:
        return newest
    found = [item for item in newest if pod_index(item) == rank]
    if not found:
        indices = ", ".join(str(pod_index(item)) for item in newest)
        raise UserError(f"run {run.name!r} has no pod of this index: got --rank {rank}; allowed: {indices}")
    return found


def read_logs(run: Run, pods: Sequence[Object], query: Mapping[str, str]) -> Iterator[PodLine]:
    """Yield the lines of all pods: in the order of arrival if followed, else pod after pod."""
    names = [str(pod["metadata"]["name"]) for pod in pods]
    containers = [main_container(pod) for pod in pods]
    if "follow" not in query or len(pods) == 1:
        for name, container in zip(names, containers, strict=True):
            yield from _read_log(run, name, {**query, "container": container})
        return
    lines: queue.Queue[PodLine | None] = queue.Queue(maxsize=10_000)

    def follow(name: str, container: str) -> None:
        """Put the lines of one pod into the queue, then None."""
        for item in _read_log(run, name, {**query, "container": container}):
            lines.put(item)
        lines.put(None)

    for name, container in zip(names, containers, strict=True):
        # Daemon threads: Ctrl-C ends the program while they wait for a line.
        threading.Thread(target=follow, args=(name, container), daemon=True).start()
    unfinished = len(names)
    while unfinished:
        found = lines.get()
        if found is None:
            unfinished -= 1
        else:
            yield found


def _read_log(run: Run, name: str, query: Mapping[str, str]) -> Iterator[PodLine]:
    """Yield the lines of one pod, or the error that ended reading them."""
    try:
        for line in run.api.lines(f"{api_path(run.namespace, 'Pod', name)}/log", **query):
            yield name, line
    except KubeApiError as error:
        yield name, error


class PlainFormatter:
    """Lines unchanged."""

    def format(self, line: str) -> list[str]:
        """Return the line."""
        return [line]


class ColumnFormatter:
    """The trainer's reports as rows of a table, its other events as text."""

    def __init__(self) -> None:
        """Start with a heading."""
        self._rows_since_heading = _ROWS_PER_HEADING

    def format(self, line: str) -> list[str]:
        """Return what to print for one line: a row, with a heading above it at intervals, or text."""
        event = parse_event(line)
        if event is None:
            return [line]
        if event["event"] != "train":
            return [format_event(event)]
        row = " ".join(_format_cell(event.get(key), width, spec) for _, key, width, spec in _COLUMNS)
        self._rows_since_heading += 1
        if self._rows_since_heading <= _ROWS_PER_HEADING:
            return [row]
        self._rows_since_heading = 1
        return [" ".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS), row]


def _format_cell(value: Any, width: int, spec: str) -> str:
    """Return a value in a column, `-` if there is none."""
    return f"{value:>{width}{spec}}" if value is not None else "-".rjust(width)


def format_event(event: Mapping[str, Any]) -> str:
    """Return any event on one line: its name, then its fields; a list as its length."""
    fields = []
    for key, value in event.items():
        if key in ("event", "time") or value is None:
            continue
        if isinstance(value, list):
            fields.append(f"{len(value)} {key}")
        else:
            fields.append(f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}")
    return f"{event['event']}: {', '.join(fields)}"
