"""The `pulumi` command: which version will do, and how Ctrl-C reaches it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from pulumi.automation import CommandResult, PulumiCommand
from pulumi.automation.errors import create_command_error

from infra.automation.errors import OperationError

#: The first that streams its events to whoever started it; with older ones the progress is read from a growing file.
OLDEST = (3, 206, 0)
_NEEDED = f"version {'.'.join(map(str, OLDEST))} or newer is needed"
_INSTALL = (
    "curl -fsSL https://get.pulumi.com | sh -s -- --version {version}   (or https://www.pulumi.com/docs/install/)"
)
#: After a command has ended, what may still hold its output open: a plugin that was killed with it.
_DRAIN_SECONDS = 10.0


def install_hint() -> str:
    """How to get the command in the version that the installed SDK was released with."""
    return _INSTALL.format(version=version("pulumi"))


class Engine(PulumiCommand):
    """The command in a process group of its own, so that Ctrl-C reaches it once, from here, and not its children.

    From a terminal the signal would go to the whole group, the program and the plugins included, and they would die
    in the middle of what the engine is trying to finish. `interrupts` counts Ctrl-C: the first asks the engine to
    finish what it is doing and stop, the second to stop at once, the third kills it.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.interrupts = 0
        self._tell = tell
        if shutil.which("pulumi") is None:
            raise OperationError(f"no `pulumi` on PATH; {_NEEDED}: {install_hint()}")
        try:
            super().__init__(skip_version_check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            text = f"`pulumi version` does not run ({error}); install it again: {install_hint()}"
            raise OperationError(text) from None
        if self.version is not None and self.version.to_tuple()[:3] < OLDEST:
            raise OperationError(f"`pulumi` is version {self.version}; {_NEEDED}: {install_hint()}")

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Callable[[str], Any] | None = None,
        on_error: Callable[[str], Any] | None = None,
    ) -> CommandResult:
        """Run one command to its end; CommandError where it fails."""
        process = subprocess.Popen(  # noqa: S603 - the arguments are the SDK's
            [self.command, "--non-interactive", *args],
            cwd=cwd,
            env=environment(additional_env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
        assert process.stdout
        assert process.stderr
        readers = [_Reader(process.stdout, on_output), _Reader(process.stderr, on_error)]
        self._wait(process)
        stdout, stderr = (reader.text() for reader in readers)
        result = CommandResult(stdout, stderr, process.returncode)
        if process.returncode:
            raise create_command_error(result)
        return result

    def _wait(self, process: subprocess.Popen[str]) -> None:
        """Wait to the end, passing each Ctrl-C on."""
        pressed = 0
        while True:
            try:
                if pressed:
                    self._stop(process, pressed)
                process.wait()
            except KeyboardInterrupt:
                self.interrupts += 1
                pressed += 1
            else:
                return

    def _stop(self, process: subprocess.Popen[str], pressed: int) -> None:
        if pressed == 1:
            self._tell("cancelling: what has begun is being finished; Ctrl-C again stops at once")
        elif pressed == 2:
            self._tell("stopping at once: what had begun may be left half-made in the cloud")
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            if pressed > 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.send_signal(signal.SIGINT)


def environment(additional: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with this Python first, so that the program finds the same packages."""
    inherited = {**os.environ, **additional}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
    return {**inherited, "PATH": path, "PULUMI_AUTOMATION_API": "true", "PULUMI_SKIP_UPDATE_CHECK": "true"}


class _Reader:
    """Collects a stream's lines in a thread, passing each on."""

    def __init__(self, stream: IO[str], on_line: Callable[[str], Any] | None) -> None:
        self._stream, self._on_line, self._lines = stream, on_line, list[str]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self._lines.append(line.rstrip())
            if self._on_line:
                self._on_line(line.rstrip())

    def text(self) -> str:
        self._thread.join(_DRAIN_SECONDS)
        return "\n".join(self._lines)
