"""A process that must go: SIGTERM or a cloud's notice, the time that is left, and the exit code that asks for a
restart.

Signals are read by a thread from a pipe that the C handler fills: the main thread may sit in a collective that never
ends, and would never run a handler of its own.
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

_SAME_SIGNAL_SECONDS = 1.0  # a launcher in the same process group passes on what the kernel has delivered already
_LOOK_SECONDS = 0.2
_LAUNCHER_LOOK_SECONDS = 1.0


class Preemption:
    """Whether this process must go. As a context manager it owns SIGTERM; only the main thread may enter it."""

    def __init__(self, config: FaultConfig, rank: int, siblings: Sequence[int]) -> None:
        self._config, self._rank, self._siblings = config, rank, siblings
        self._lock = threading.Lock()
        self._closed, self._stopping = threading.Event(), threading.Event()
        self._asked_at: float | None = None
        self.reason: str | None = None
        self.machine_goes = False

    @property
    def requested(self) -> bool:
        """Whether this process was told to go."""
        return self._asked_at is not None

    @property
    def seconds_left(self) -> float:
        """Of the grace period."""
        if self._asked_at is None:
            return float(self._config.grace_seconds)
        return self._config.grace_seconds - (time.monotonic() - self._asked_at)

    def request(self, reason: str, machine_goes: bool = False) -> None:
        """From any thread: this process must go. `machine_goes`: no process may start here again."""
        with self._lock:
            if self._asked_at is not None:
                return
            self._asked_at, self.reason, self.machine_goes = time.monotonic(), reason, machine_goes
        threading.Thread(target=self._enforce, name="grace-period", daemon=True).start()

    def stopping(self) -> None:
        """All processes have agreed to stop: from now on one that ends is no reason to hurry."""
        self._stopping.set()

    def tell_launcher(self) -> None:
        """Where the machine goes away, end torchrun's agent here as well: it would start the processes once more.

        An agent that gets SIGTERM leaves without closing the rendezvous, so other machines go on.
        """
        if self.machine_goes and _under_torchrun():
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
        # Otherwise the process is ending already, and its own exit code says more than that of a signal: the launcher
        # sends one to all processes once it has seen that one of them is dead.
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write_end)

    def _listen(self) -> None:
        first: float | None = None
        while data := os.read(self._read_end, 16):
            if signal.SIGTERM not in data:
                continue
            if first is not None and time.monotonic() - first > _SAME_SIGNAL_SECONDS:
                self._end(EXIT_TERMINATED, "a second SIGTERM: stopping at once")
            first = first or time.monotonic()
            self.request("SIGTERM")
        os.close(self._read_end)

    def _watch_launcher(self, launcher: int) -> None:
        """A process whose launcher was killed would train on, unseen, beside those of the next start."""
        while not self._closed.wait(_LAUNCHER_LOOK_SECONDS):
            if os.getppid() != launcher:
                self.request(f"the launcher (process {launcher}) has died")
                return

    def _enforce(self) -> None:
        """End the process when its time is up, or when a process beside it has died: then the launcher is restarting
        all of them, and the step that would agree on a stop never comes."""
        while not self._closed.wait(_LOOK_SECONDS):
            if self.seconds_left <= 0:
                self._end(
                    EXIT_RESTART,
                    f"rank {self._rank} was not done {self._config.grace_seconds} s after {self.reason} "
                    f"(fault.grace_seconds): stopping; a save that is not complete does not count",
                )
            if not self._stopping.is_set() and not all(map(_is_alive, self._siblings)):
                self._end(EXIT_RESTART, None)

    def _end(self, code: int, message: str | None) -> None:
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
    except PermissionError:  # another user's process has taken the number
        return False
    return True
