"""Runs checks concurrently, each with a time limit, and shows the progress."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TextIO

from rich.console import Console
from rich.status import Status

from infra.findings.common_causes import API_CLOSED, API_FORBIDDEN, API_LOGIN, BROKEN, SLOW
from infra.findings.model import Check, Finding, QueryFailedError, problem, skipped, unknown, with_check_name
from infra.kube_api import KubeApiError, KubeconfigError

_PROGRESS_SECONDS = 5.0
_POLL_SECONDS = 0.1


def run(checks: Sequence[Check], title: str, stream: TextIO | None = None) -> list[Finding]:
    """Run all checks and return their findings in the order of the checks; KeyboardInterrupt stops at once.

    Each check runs in its own thread, which is abandoned after the time limit: clouds' clients retry for minutes.
    """
    names = {check.name for check in checks}
    assert len(names) == len(checks), "two checks with the same name"
    assert all(check.needs in names for check in checks if check.needs), "a check needs another that does not exist"
    with Progress(title, len(checks), stream or sys.stderr) as progress:
        return _Run(checks, progress).results()


def answer(check: Check) -> list[Finding]:
    """Run a check and return its findings, also if the cloud or the cluster refused to answer."""
    try:
        return with_check_name(check.name, check.run())
    except QueryFailedError as error:
        return with_check_name(check.name, error.finding)
    except KubeApiError as error:
        return with_check_name(check.name, _explain(error))


def _explain(error: KubeApiError) -> Finding:
    """Return the finding for a request that the Kubernetes API refused or did not answer."""
    if isinstance(error, KubeconfigError) or error.status == HTTPStatus.UNAUTHORIZED:
        return problem(API_LOGIN, error.reason, login=error.fix)
    if error.status == HTTPStatus.FORBIDDEN:
        return unknown(API_FORBIDDEN, error.reason, what=error.path.rpartition("/")[2])
    return unknown(API_CLOSED, error.reason)


class _Run:
    """One run of checks: those waiting for another check, the running ones and the findings."""

    def __init__(self, checks: Sequence[Check], progress: Progress) -> None:
        self._checks, self._progress = checks, progress
        self._waiting = list(checks)
        self._running: dict[str, tuple[Check, float]] = {}
        self._found: dict[str, list[Finding]] = {}
        self._answers: queue.Queue[tuple[str, list[Finding]]] = queue.Queue()

    def results(self) -> list[Finding]:
        """Run until every check has findings."""
        while len(self._found) < len(self._checks):
            self._start()
            self._collect()
            self._give_up()
            self._progress.show(len(self._found), list(self._running))
        return [finding for check in self._checks for finding in self._found[check.name]]

    def _start(self) -> None:
        """Start the checks whose needed check is done; skip those whose needed check is not ok."""
        for check in list(self._waiting):
            needed = self._found.get(check.needs or "")
            if check.needs and needed is None:
                continue
            self._waiting.remove(check)
            if needed is not None and any(item.status in ("problem", "unknown", "skipped") for item in needed):
                self._found[check.name] = with_check_name(check.name, skipped(f"needs the check {check.needs!r}"))
                continue
            self._running[check.name] = (check, time.monotonic())
            threading.Thread(target=self._answer, args=(check,), daemon=True).start()

    def _answer(self, check: Check) -> None:
        """Run one check and queue its findings."""
        try:
            found = answer(check)
        except Exception as error:  # one broken check must not hide the findings of the others
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            found = with_check_name(check.name, unknown(BROKEN, result))
        self._answers.put((check.name, found))

    def _collect(self) -> None:
        """Wait shortly for the next findings."""
        try:
            name, found = self._answers.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        if name in self._running:  # otherwise its time limit has passed
            del self._running[name]
            self._found[name] = found

    def _give_up(self) -> None:
        """Stop waiting for checks whose time limit has passed."""
        for name, (check, since) in list(self._running.items()):
            if time.monotonic() - since > check.seconds:
                del self._running[name]
                self._found[name] = with_check_name(name, unknown(SLOW, f"no answer in {check.seconds:g} s"))


class Progress:
    """A status line on a terminal; otherwise a line at the start and every few seconds."""

    def __init__(self, title: str, total: int, stream: TextIO) -> None:
        self._title, self._total, self._stream = title, total, stream
        console = Console(file=stream, highlight=False)
        self._status: Status | None = Status(title, console=console) if console.is_terminal else None
        self._since = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        else:
            self._line(f"{self._title}: {self._total} checks ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def show(self, done: int, running: Sequence[str]) -> None:
        """Show the number of finished checks and the running ones."""
        now = time.monotonic()
        text = f"{done} of {self._total} done, {now - self._since:.0f} s; now: {', '.join(running)}"
        if self._status:
            self._status.update(f"{self._title}: {text}")
        elif now - self._last_line >= _PROGRESS_SECONDS and running:
            self._last_line = now
            self._line(f"... {text}")

    def _line(self, text: str) -> None:
        """Write a line at once."""
        self._stream.write(text + "\n")
        self._stream.flush()
