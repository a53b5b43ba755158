"""Running the real `pulumi` on the real program: a project folder of its own, the CLI and the Automation API."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine_provider import Server
from pulumi import automation

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "torchrec-cloud"
PASSPHRASE = "not-a-real-passphrase"
Driver = Literal["cli", "automation", "ours"]
Verb = Literal["preview", "up", "refresh", "destroy"]

#: What the program reads beside its settings: the packages, and what the image's tag is computed from.
_LINKED = ("infra", "workloads", "trainer", "LICENSE", "__main__.py", "requirements.txt", ".venv")

#: What a person's own script does with `infra.automation`; the verb and the stack are its arguments.
_SCRIPT = """
import sys
from pathlib import Path
from infra.automation import LiveStack, OperationError
try:
    getattr(LiveStack(sys.argv[2], folder=Path.cwd()), sys.argv[1])()
except OperationError as error:
    sys.exit(f"error: {error}")
"""

#: Steps of the engine that change nothing or only look.
_QUIET = {"same", "read", "refresh", "read-discard"}


@dataclass(frozen=True)
class Step:
    """One thing that the engine did, or in a preview would do; `diffs` are the paths that caused it."""

    op: str
    type: str
    name: str
    diffs: tuple[str, ...] = ()


@dataclass
class Run:
    """One run of the engine: whether it went well, what it did, what a person read."""

    ok: bool
    output: str
    seconds: float
    steps: list[Step] = field(default_factory=list)

    @property
    def changes(self) -> list[Step]:
        """Steps that changed something, components left out: they are the program's own and cost nothing."""
        return [step for step in self.steps if step.op not in _QUIET and not step.type.startswith("torchrec-cloud:")]

    def of_op(self, *ops: str) -> list[Step]:
        """The changes of these kinds."""
        return [step for step in self.changes if step.op in ops]

    def summary(self) -> Counter[str]:
        """How many changes of each kind."""
        return Counter(step.op for step in self.changes)


class Project:
    """A stack in a folder of its own, with a backend of its own, against a server of its own."""

    def __init__(self, folder: Path, stack: str, server: Server, environment: Mapping[str, str]) -> None:
        self.folder, self.stack, self._number = folder, stack, 0
        self._work = folder / "project"
        self._lay_out()
        backend = folder / "backend"
        backend.mkdir()
        self.environment = {
            **_without_pulumi(os.environ),
            **server.environment,
            **environment,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PULUMI_BACKEND_URL": f"file://{backend}",
            "PULUMI_CONFIG_PASSPHRASE": PASSPHRASE,
            # Without it the CLI does not know `--event-log`.
            "PULUMI_DEBUG_COMMANDS": "true",
            "PULUMI_HOME": str(folder / "home"),
            "PULUMI_SKIP_UPDATE_CHECK": "1",
        }
        self.pulumi("stack", "init", stack)

    def pulumi(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the CLI in the project's folder."""
        done = subprocess.run(
            ["pulumi", "--non-interactive", "--color=never", *arguments],
            cwd=self._work,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"pulumi {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done

    def set(self, path: str, value: object) -> None:
        """`pulumi config set --path`, as the errors of the program advise it."""
        self.pulumi("config", "set", "--stack", self.stack, "--path", path, str(value))

    def replace_program(self, text: str) -> None:
        """Another program in the place of this repository's own."""
        program = self._work / "__main__.py"
        program.unlink()
        program.write_text(text)

    def run(self, verb: Verb, driver: Driver = "cli") -> Run:
        """One run of the engine, by the CLI, the Automation API or `infra.automation`; a failure is an answer."""
        by = {"cli": self._by_cli, "automation": self._by_automation, "ours": self._by_ours}
        return by[driver](verb)

    def export(self) -> str:
        """The stack's state as a person or a backup would read it."""
        return self.pulumi("stack", "export", "--stack", self.stack).stdout

    def resources(self) -> list[dict[str, Any]]:
        """The state's resources."""
        found = json.loads(self.export())["deployment"].get("resources") or []
        return list(found)

    def _lay_out(self) -> None:
        """Settings are copied, since commands write to them; code is linked, since it is compiled already."""
        self._work.mkdir(parents=True)
        for path in (ROOT / name for name in _LINKED):
            (self._work / path.name).symlink_to(path)
        for path in ROOT.glob("Pulumi*.yaml"):
            shutil.copy(path, self._work)

    def _by_cli(self, verb: Verb) -> Run:
        self._number += 1
        log = self.folder / f"events-{self._number}.json"
        flags = {"preview": ["--diff"], "up": ["--yes", "--skip-preview"], "refresh": ["--yes"], "destroy": ["--yes"]}
        started = time.monotonic()
        done = self.pulumi(verb, "--stack", self.stack, *flags[verb], "--event-log", str(log), check=False)
        seconds = time.monotonic() - started
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        kind = "resourcePreEvent" if verb == "preview" else "resOutputsEvent"
        steps = [_step(event[kind]["metadata"]) for event in events if kind in event]
        return Run(done.returncode == 0, done.stdout + done.stderr, seconds, steps)

    def _by_ours(self, verb: Verb) -> Run:
        """`infra.automation` in a process of its own; it tells what it did in words, so there are no steps."""
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, verb, self.stack],
            cwd=self._work,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return Run(done.returncode == 0, done.stdout + done.stderr, time.monotonic() - started)

    def _by_automation(self, verb: Verb) -> Run:
        """The repository's program as an inline one: in this process, which has imported the SDKs long ago."""
        options = automation.LocalWorkspaceOptions(work_dir=str(self._work), env_vars=_only_pulumi(self.environment))
        stack = automation.select_stack(self.stack, project_name=PROJECT, program=_program, opts=options)
        steps: list[Step] = []
        wanted = "resource_pre_event" if verb == "preview" else "res_outputs_event"

        def heard(event: automation.EngineEvent) -> None:
            found = getattr(event, wanted)
            if found is not None:
                steps.append(_step(found.metadata.__dict__))

        started = time.monotonic()
        try:
            output = getattr(stack, verb)(on_event=heard, color="never").stdout
        except automation.CommandError as error:
            return Run(False, str(error), time.monotonic() - started, steps)
        return Run(True, output, time.monotonic() - started, steps)


def _program() -> None:
    runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__")


def _step(metadata: Mapping[str, Any]) -> Step:
    urn = str(metadata["urn"])
    op = metadata["op"]
    detailed = metadata.get("detailedDiff") or metadata.get("detailed_diff") or {}
    diffs = metadata.get("diffs") or ()
    return Step(getattr(op, "value", op), str(metadata["type"]), urn.rpartition("::")[2], tuple({*detailed, *diffs}))


def _without_pulumi(environment: Mapping[str, str]) -> dict[str, str]:
    """A person's own settings of Pulumi must not decide what a test sees."""
    return {key: value for key, value in environment.items() if not key.startswith("PULUMI_")}


def _only_pulumi(environment: Mapping[str, str]) -> dict[str, str]:
    """What differs from this process: the Automation API adds its variables to ours."""
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}
