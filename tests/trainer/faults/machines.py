"""Jobs on this machine, started, watched and restarted as torchrun's agent does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopback import free_port
from small_jobs import HERE, ROOT, environment, tiny_tree

FAULTS_FOLDER = Path(__file__).resolve().parent
_HANG_SECONDS = 90.0  # a process that runs longer hangs, even on a slow machine


@dataclass
class Attempt:
    """One start of a job."""

    processes: list[subprocess.Popen[bytes]]
    log: Path

    def codes(self) -> list[int | None]:
        """Return the exit codes, None for a process that is running."""
        return [process.poll() for process in self.processes]

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to one process."""
        self.processes[rank].send_signal(number)

    def wait(self, help_along: bool = True) -> list[int]:
        """Wait for all processes and return their exit codes; a process that hangs fails the test.

        With `help_along`, SIGTERM is sent to the others once one has failed, as torchrun does.
        """
        terminated, until = not help_along, time.monotonic() + _HANG_SECONDS
        while None in (codes := self.codes()):
            if not terminated and any(codes):
                terminated = True
                for process in self.processes:
                    process.send_signal(signal.SIGTERM)
            if time.monotonic() > until:
                for process in self.processes:
                    process.kill()
                raise AssertionError(f"hung with exit codes {codes}:\n{self.log.read_text()[-6000:]}")
            time.sleep(0.01)
        return [code for code in codes if code is not None]

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """Return the first event in the log with that name and these fields."""
        until = time.monotonic() + _HANG_SECONDS
        while time.monotonic() < until:
            for line in self.events():
                if line["event"] == event and all(line.get(k) == v for k, v in fields.items()):
                    return line
            assert None in self.codes(), f"ended before {event} {fields}:\n{self.log.read_text()[-6000:]}"
            time.sleep(0.01)
        raise AssertionError(f"no {event} {fields}:\n{self.log.read_text()[-6000:]}")

    def resumed_at(self) -> int | None:
        """Return the step from which the start resumed, None without a checkpoint."""
        return next((int(e["step"]) for e in self.events() if e["event"] == "resume"), None)

    def events(self) -> list[dict[str, Any]]:
        """Return the events in the log so far."""
        return events_in(self.log.read_text()) if self.log.exists() else []


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of complete JSON lines."""
    lines = [line for line in text.splitlines(keepends=True) if line.startswith("{") and line.endswith("}\n")]
    return [json.loads(line) for line in lines]


def places(world: int) -> list[dict[str, str]]:
    """Return torchrun's variables for each of `world` processes of a new job, none for a single process."""
    if world == 1:
        return [{}]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def start_job(commands: list[list[str]], log: Path, env: Mapping[str, str]) -> Attempt:
    """Start one Python per command as the processes of a job, all of which write into `log`."""
    folders = os.pathsep.join([str(ROOT), str(HERE), str(FAULTS_FOLDER)])
    processes = []
    with log.open("ab") as stream:
        for command, place in zip(commands, places(len(commands)), strict=True):
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env=environment(PYTHONPATH=folders, **place, **env),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                )
            )
    return Attempt(processes, log)


@dataclass
class Machines:
    """Starts jobs of a run named `a` under `folder`."""

    folder: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0

    def start(
        self,
        world: int,
        faults: Mapping[int, Mapping[str, Any]] | None = None,
        env: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Attempt:
        """Start the run with `faults` by rank and `changes` of options, with __ for dots."""
        self.starts += 1
        dotted = {"checkpoint.uri": str(self.folder), "train.run": "a", **self.changes}
        dotted |= {name.replace("__", "."): value for name, value in changes.items()}
        file, log = self.folder / f"config-{self.starts}.json", self.folder / f"log-{self.starts}.txt"
        file.write_text(json.dumps(tiny_tree(dotted)), encoding="utf-8")
        train, own = ["train", "--config", str(file)], {"TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})}
        commands = [["-m", "trainer", *train] for _ in range(world)]
        for rank, fault in (faults or {}).items():
            commands[rank] = ["-m", "injected", json.dumps(fault), *train]
        return start_job(commands, log, own)

    def finished(self, world: int, **changes: Any) -> dict[str, Any]:
        """Run to the end and return the result event."""
        attempt = self.start(world, **changes)
        codes = attempt.wait()
        assert codes == [0] * world, f"{codes}\n{attempt.log.read_text()[-6000:]}"
        return result_of(attempt)


def result_of(attempt: Attempt) -> dict[str, Any]:
    """Return the result event of a start."""
    (result,) = (e for e in attempt.events() if e["event"] == "result")
    return result
