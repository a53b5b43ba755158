"""Preemption of a process: SIGTERM or a spot notice, the grace period, and the exit code that requests a restart.

A thread reads signals from a pipe that the C handler fills. The main thread may be in a collective that never ends, and
then never runs a Python handler.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from trainer.config import FaultConfig
from trainer.exit_codes import EXIT_RESTART, EXIT_TERMINATED

_SAME_SIGNAL_SECONDS = 1.0  # a launcher in the same process group forwards a signal that the kernel already delivered
_POLL_SECONDS = 0.2
_LAUNCHER_POLL_SECONDS = 1.0


class Preemption:
    """Requests to stop this process. As a context manager it handles SIGTERM; only the main thread may enter it."""

    def __init__(self, config: FaultConfig, rank: int, siblings: Sequence[int]) -> None:
        self._config, self._rank, self._siblings = config, rank, siblings
        self._lock = threading.Lock()
        self._closed, self._stopping = threading.Event(), threading.Event()
        self._requested_at: float | None = None
        self.reason: str | None = None
        self.machine_ends = False

    @property
    def requested(self) -> bool:
        """Whether this process was requested to stop."""
        return self._requested_at is not None

    @property
    def seconds_left(self) -> float:
        """What is left of the grace period."""
        if self._requested_at is None:
            return float(self._config.grace_seconds)
        return self._config.grace_seconds - (time.monotonic() - self._requested_at)

    def request(self, reason: str, machine_ends: bool = False) -> None:
        """Request a stop, from any thread; with `machine_ends` no process may start on this machine again."""
        with self._lock:
            if self._requested_at is not None:
                return
            self._requested_at, self.reason, self.machine_ends = time.monotonic(), reason, machine_ends
        threading.Thread(target=self._enforce_deadline, name="grace-period", daemon=True).start()

    def mark_stopping(self) -> None:
        """Record that all processes have agreed to stop: from now on, one that exits is expected."""
        self._stopping.set()

    def stop_launcher(self) -> None:
        """Stop this machine's torchrun agent if the machine ends, or it would restart the processes.

        An agent that gets SIGTERM exits without closing the rendezvous, so other machines continue.
        """
        if self.machine_ends and _under_torchrun():
            os.kill(os.getppid(), signal.SIGTERM)

    def __enter__(self) -> Preemption:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._old_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        if _under_torchrun():
            threading.Thread(target=self._watch_launcher, args=(os.getppid(),), name="launcher", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if error is None:
            signal.signal(signal.SIGTERM, self._old_handler)
        # After an error the process is ending, and its own exit code is more informative than that of a signal, which
        # the launcher sends to all processes as soon as one of them is dead.
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write_end)

    def _listen(self) -> None:
        first: float | None = None
        while data := os.read(self._read_end, 16):
            if signal.SIGTERM not in data:
                continue
            if first is not None and time.monotonic() - first > _SAME_SIGNAL_SECONDS:
                self._exit(EXIT_TERMINATED, "a second SIGTERM: stopping at once")
            first = first or time.monotonic()
            self.request("SIGTERM")
        os.close(self._read_end)

    def _watch_launcher(self, launcher: int) -> None:
        """Request a stop if the launcher dies, or this process would train on next to those of the next start."""
        while not self._closed.wait(_LAUNCHER_POLL_SECONDS):
            if os.getppid() != launcher:
                self.request(f"the launcher (process {launcher}) has died")
                return

    def _enforce_deadline(self) -> None:
        """End the process after its grace period, or when a sibling has died.

        In the second case the launcher is restarting all processes, and the step that would vote to stop never comes.
        """
        while not self._closed.wait(_POLL_SECONDS):
            if self.seconds_left <= 0:
                self._exit(
                    EXIT_RESTART,
                    f"rank {self._rank} was not done {self._config.grace_seconds} s after {self.reason} "
                    f"(fault.grace_seconds): stopping; an incomplete save will be ignored",
                )
            if not self._stopping.is_set() and not all(map(_is_alive, self._siblings)):
                self._exit(EXIT_RESTART, None)

    def _exit(self, code: int, message: str | None) -> None:
        if message is not None:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
        os._exit(code)


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process id now belongs to another user's process
        return False
    return True
