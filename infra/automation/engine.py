"""The `pulumi` command: its minimum version, and how Ctrl-C reaches it."""

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

import yaml
from pulumi.automation import CommandResult, PulumiCommand
from pulumi.automation.errors import create_command_error

from infra.automation.errors import OperationError

#: The first version that streams its events to its caller; with older ones, progress is read from a growing file.
OLDEST_VERSION = (3, 206, 0)
_REQUIRED = f"version {'.'.join(map(str, OLDEST_VERSION))} or newer is needed"
_INSTALL = (
    "curl -fsSL https://get.pulumi.com | sh -s -- --version {version}   (or https://www.pulumi.com/docs/install/)"
)
#: How long to wait for the output of a command that has ended: a plugin that was killed with it may hold it open.
_DRAIN_SECONDS = 10.0


def install_hint() -> str:
    """Return how to install the command in the version of the installed SDK."""
    return _INSTALL.format(version=version("pulumi"))


class Engine(PulumiCommand):
    """The command in its own process group, so that Ctrl-C reaches only the engine and not its children.

    A terminal sends the signal to the whole process group. The program and the plugins would then exit while the
    engine still needs them. `interrupts` counts Ctrl-C: after the first the engine finishes its running steps and
    stops, after the second it stops at once, and the third kills it.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.interrupts = 0
        self._log = log
        if shutil.which("pulumi") is None:
            raise OperationError(f"no `pulumi` on PATH; {_REQUIRED}. Fix: {install_hint()}")
        try:
            super().__init__(skip_version_check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            text = f"`pulumi version` does not run ({error}). Fix: install it again: {install_hint()}"
            raise OperationError(text) from None
        if self.version is not None and self.version.to_tuple()[:3] < OLDEST_VERSION:
            raise OperationError(f"`pulumi` is version {self.version}; {_REQUIRED}. Fix: {install_hint()}")

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Callable[[str], Any] | None = None,
        on_error: Callable[[str], Any] | None = None,
    ) -> CommandResult:
        """Run one command to its end, or raise CommandError if it fails."""
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
        stdout, stderr = (reader.read() for reader in readers)
        result = CommandResult(stdout, stderr, process.returncode)
        if process.returncode:
            raise create_command_error(result)
        return result

    def _wait(self, process: subprocess.Popen[str]) -> None:
        """Wait until the process ends, and forward each Ctrl-C to it."""
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
            self._log("cancelling: running steps are being finished; Ctrl-C again stops at once")
        elif pressed == 2:
            self._log("stopping at once: running steps may leave incomplete resources in the cloud")
        with contextlib.suppress(ProcessLookupError):  # it may have ended in the meantime
            if pressed > 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.send_signal(signal.SIGINT)


def require_environment(folder: Path) -> None:
    """Raise OperationError if a project has no virtual environment: the engine would silently install one with pip."""
    project = yaml.safe_load((folder / "Pulumi.yaml").read_text(encoding="utf-8"))
    runtime = project.get("runtime")
    name = runtime.get("options", {}).get("virtualenv") if isinstance(runtime, dict) else None
    if name and not (folder / name / "bin" / "python").exists():
        raise OperationError(f"no Python environment: got none at {folder / name}. Fix: make install-infra")


def environment(additional: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with this Python first on PATH, for programs without a virtual environment."""
    inherited = {**os.environ, **additional}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
    return {**inherited, "PATH": path, "PULUMI_AUTOMATION_API": "true", "PULUMI_SKIP_UPDATE_CHECK": "true"}


class _Reader:
    """Collects a stream's lines in a thread and passes each to a callback."""

    def __init__(self, stream: IO[str], on_line: Callable[[str], Any] | None) -> None:
        self._stream, self._on_line, self._lines = stream, on_line, list[str]()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for line in self._stream:
            self._lines.append(line.rstrip())
            if self._on_line:
                self._on_line(line.rstrip())

    def read(self) -> str:
        """Return all lines, once the stream has ended."""
        self._thread.join(_DRAIN_SECONDS)
        return "\n".join(self._lines)
