"""Jobs of forked processes on this machine, started, watched and restarted the way torchrun's agent does it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_jobs import HERE, ROOT, environment, tiny_tree

FAULTS_FOLDER = Path(__file__).resolve().parent
_HANG_SECONDS = 90.0  # a process that runs longer hangs, even on a slow machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Zygote:
    """See zygote.py."""

    def __init__(self) -> None:
        folders = os.pathsep.join([str(ROOT), str(HERE), str(FAULTS_FOLDER)])
        self._process = subprocess.Popen(
            [sys.executable, str(FAULTS_FOLDER / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(PYTHONPATH=folders),
        )
        self._codes: dict[int, int] = {}

    def start(
        self,
        argv: list[str],
        env: dict[str, str],
        log: Path,
        fault: Mapping[str, Any] | None = None,
        module: str = "trainer.main",
    ) -> int:
        """The process id."""
        order = {"module": module, "argv": argv, "env": env, "log": str(log), "fault": fault}
        return int(self._ask({"start": order})["pid"])

    def code(self, pid: int) -> int | None:
        """The exit code, None while it runs."""
        if pid not in self._codes:
            self._codes |= {int(p): c for p, c in self._ask({"ended": None})["ended"].items()}
        return self._codes.get(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_HANG_SECONDS)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@dataclass
class Attempt:
    """One start of a job."""

    zygote: Zygote
    pids: list[int]
    log: Path

    def codes(self) -> list[int | None]:
        return [self.zygote.code(pid) for pid in self.pids]

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, help_along: bool = True) -> list[int]:
        """Wait for all processes and return their exit codes; a process that hangs fails the test.

        With `help_along`, SIGTERM is sent to the others once one has failed, as torchrun does.
        """
        told, until = not help_along, time.monotonic() + _HANG_SECONDS
        while None in (codes := self.codes()):
            if not told and any(codes):
                told = True
                for pid, code in zip(self.pids, codes, strict=True):
                    if code is None:
                        os.kill(pid, signal.SIGTERM)
            if time.monotonic() > until:
                for pid in self.pids:
                    if self.zygote.code(pid) is None:
                        os.kill(pid, signal.SIGKILL)
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


@dataclass
class Machines:
    """Starts jobs of a run named `a` under `folder`."""

    zygote: Zygote
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
        argv, pids = ["train", "--config", str(file)], []
        for rank, mine in enumerate(places(world)):
            pids.append(self.zygote.start(argv, mine | dict(env or {}), log, (faults or {}).get(rank)))
        return Attempt(self.zygote, pids, log)

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
