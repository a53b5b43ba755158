"""`logs`: what the pods of a run wrote, each line with its pod in front, the trainer's reports as columns."""

from __future__ import annotations

import argparse
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.kube_api import KubeApiError, Object, api_path
from workloads.cli import snapshot
from workloads.cli.errors import EXIT_FAILED, EXIT_OK, CliError
from workloads.cli.metrics import as_event
from workloads.cli.target import Target, open_target

#: Columns of a report: heading, key, width and form.
_COLUMNS = (
    ("STEP", "step", 10, ",d"),
    ("LOSS", "loss", 8, ".4f"),
    ("NE", "ne", 8, ".4f"),
    ("AUC", "auc", 8, ".4f"),
    ("SAMPLES/S", "samples_per_second", 13, ",.0f"),
)
_HEADING_EVERY = 40


def logs_command(arguments: argparse.Namespace) -> int:
    """0; 1 where a pod's log cannot be read."""
    target = open_target(arguments)
    pods = chosen(target, arguments.rank, arguments.pod)
    query = {"container": "", "follow": "true" if arguments.follow else "", "previous": "true" * arguments.previous}
    query |= {"tailLines": "" if arguments.tail is None else str(arguments.tail)}
    wanted = {key: value for key, value in query.items() if value}
    pretty = sys.stdout.isatty() if arguments.pretty is None else arguments.pretty
    form = Pretty() if pretty else Plain()
    failed = False
    for name, line in merged(target, pods, wanted):
        if isinstance(line, KubeApiError):
            failed = True
            sys.stderr.write(f"{name}: {line}\n")
            continue
        prefix = f"{name}  " if len(pods) > 1 else ""
        for shown in form.lines(line):
            sys.stdout.write(f"{prefix}{shown}\n")
        sys.stdout.flush()
    return EXIT_FAILED if failed else EXIT_OK


def chosen(target: Target, rank: int | None, pod: str | None) -> list[Object]:
    """The pods that the options name; all of the run's newest without one. A rank is the index of a pod."""
    _, job = target.found_job()
    pods = target.api.items(api_path(target.namespace, "Pod"), labelSelector=target.selector)
    if pod is not None:
        found = [item for item in pods if item["metadata"]["name"] == pod]
        names = ", ".join(str(item["metadata"]["name"]) for item in pods) or "none"
        if not found:
            raise CliError(f"--pod is {pod!r}; the pods of run {target.run!r} are: {names}")
        return found
    newest = [item for item, _ in snapshot.newest_of_each(snapshot.of_job(pods, str(job["metadata"]["name"])))]
    if not newest:
        raise CliError(f"run {target.run!r} has no pods; `python -m workloads status {target.options}` says why")
    if rank is None:
        return newest
    found = [item for item in newest if snapshot.index_of(item) == rank]
    if not found:
        legal = ", ".join(str(snapshot.index_of(item)) for item in newest)
        raise CliError(f"--rank is {rank}; the pods of run {target.run!r} have the indices {legal}")
    return found


def merged(
    target: Target, pods: Sequence[Object], query: Mapping[str, str]
) -> Iterator[tuple[str, str | KubeApiError]]:
    """Lines of all pods with the pod's name: as they come when followed, pod after pod otherwise."""
    names = [str(pod["metadata"]["name"]) for pod in pods]
    containers = [main_container(pod) for pod in pods]
    if "follow" not in query or len(pods) == 1:
        for name, container in zip(names, containers, strict=True):
            yield from _read(target, name, {**query, "container": container})
        return
    lines: queue.Queue[tuple[str, str | KubeApiError] | None] = queue.Queue(maxsize=10_000)

    def pump(name: str, container: str) -> None:
        for item in _read(target, name, {**query, "container": container}):
            lines.put(item)
        lines.put(None)

    for name, container in zip(names, containers, strict=True):
        # Daemons: Ctrl-C ends the program although they wait for a line that may never come.
        threading.Thread(target=pump, args=(name, container), daemon=True).start()
    left = len(names)
    while left:
        found = lines.get()
        if found is None:
            left -= 1
        else:
            yield found


def main_container(pod: Object) -> str:
    """The trainer's container: the first; a fabric's sidecars are init containers."""
    return str(pod["spec"]["containers"][0]["name"])


def _read(target: Target, name: str, query: Mapping[str, str]) -> Iterator[tuple[str, str | KubeApiError]]:
    try:
        for line in target.api.lines(f"{api_path(target.namespace, 'Pod', name)}/log", **query):
            yield name, line
    except KubeApiError as error:
        yield name, error


class Plain:
    """Lines as they are."""

    def lines(self, line: str) -> list[str]:
        """The line itself."""
        return [line]


class Pretty:
    """The trainer's reports as columns, its other events in words."""

    def __init__(self) -> None:
        self._since_heading = _HEADING_EVERY

    def lines(self, line: str) -> list[str]:
        """What is shown for one line: a heading now and then, a row, or the line."""
        event = as_event(line)
        if event is None:
            return [line]
        if event["event"] != "train":
            return [words(event)]
        row = " ".join(_cell(event.get(key), width, form) for _, key, width, form in _COLUMNS)
        self._since_heading += 1
        if self._since_heading <= _HEADING_EVERY:
            return [row]
        self._since_heading = 1
        return [" ".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS), row]


def _cell(value: Any, width: int, form: str) -> str:
    return f"{value:>{width}{form}}" if value is not None else "-".rjust(width)


def words(event: Mapping[str, Any]) -> str:
    """Any event on one line: its name, then what it says; a plan by its number of tables."""
    shown = []
    for key, value in event.items():
        if key in ("event", "time") or value is None:
            continue
        if isinstance(value, list):
            shown.append(f"{len(value)} {key}")
        else:
            shown.append(f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}")
    return f"{event['event']}: {', '.join(shown)}"
