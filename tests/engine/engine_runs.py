"""Run the real `pulumi` on the real program, in a separate project folder, by CLI or Automation API."""

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

from workloads import image

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "torchrec-cloud"
PASSPHRASE = "not-a-real-passphrase"
Driver = Literal["cli", "automation", "live_stack"]
Verb = Literal["preview", "up", "refresh", "destroy"]

#: Files that the program reads in addition to its settings; the image's tag is computed from some of them.
_LINKED = ("infra", "workloads", "trainer", "LICENSE", ".dockerignore", "__main__.py", "requirements.txt", ".venv")

#: A user's script with `infra.automation`; its arguments are the verb and the stack.
_SCRIPT = """
import sys
from pathlib import Path
from infra.automation import LiveStack, OperationError
try:
    getattr(LiveStack(sys.argv[2], folder=Path.cwd()), sys.argv[1])()
except OperationError as error:
    sys.exit(f"error: {error}")
"""

#: Engine steps that change nothing.
_QUIET = {"same", "read", "refresh", "read-discard"}


@dataclass(frozen=True)
class Step:
    """One operation of the engine, planned if in a preview; `diffs` are the paths that caused it."""

    op: str
    type: str
    name: str
    diffs: tuple[str, ...] = ()


@dataclass
class Run:
    """One run of the engine: whether it succeeded, its steps and its output."""

    ok: bool
    output: str
    seconds: float
    steps: list[Step] = field(default_factory=list)

    @property
    def changes(self) -> list[Step]:
        """The steps that changed something, without the program's own components."""
        return [step for step in self.steps if step.op not in _QUIET and not step.type.startswith("torchrec-cloud:")]

    def of_op(self, *ops: str) -> list[Step]:
        """Return the changes with these operations."""
        return [step for step in self.changes if step.op in ops]

    def summary(self) -> Counter[str]:
        """Count the changes by operation."""
        return Counter(step.op for step in self.changes)


class Project:
    """A stack with its own folder, backend and provider server."""

    def __init__(self, folder: Path, stack: str, server: Server, environment: Mapping[str, str]) -> None:
        self.folder, self.stack, self._number = folder, stack, 0
        self.work = folder / "project"
        self._create_folder()
        backend = folder / "backend"
        backend.mkdir()
        self.environment = {
            **_without_pulumi(os.environ),
            **server.environment,
            **environment,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PULUMI_BACKEND_URL": f"file://{backend}",
            "PULUMI_CONFIG_PASSPHRASE": PASSPHRASE,
            # The CLI accepts `--event-log` only with this.
            "PULUMI_DEBUG_COMMANDS": "true",
            "PULUMI_HOME": str(folder / "home"),
            "PULUMI_SKIP_UPDATE_CHECK": "1",
        }
        self.pulumi("stack", "init", stack)

    def pulumi(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the CLI in the project's folder."""
        done = subprocess.run(
            ["pulumi", "--non-interactive", "--color=never", *arguments],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"pulumi {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done

    def set(self, path: str, value: object) -> None:
        """Run `pulumi config set --path`, as the program's error messages recommend."""
        self.pulumi("config", "set", "--stack", self.stack, "--path", path, str(value))

    def replace_program(self, text: str) -> None:
        """Replace this repository's program by another one."""
        program = self.work / "__main__.py"
        program.unlink()
        program.write_text(text)

    def run(self, verb: Verb, driver: Driver = "cli") -> Run:
        """Run the engine by the CLI, the Automation API or `infra.automation`; return failures, too."""
        drivers = {"cli": self._run_cli, "automation": self._run_automation, "live_stack": self._run_live_stack}
        return drivers[driver](verb)

    def command(self, *arguments: str, **environment: str) -> Run:
        """Run a command of this repository, such as `python -m infra doctor`, in the project's folder."""
        program = sys.executable if arguments[0] == "python" else arguments[0]
        started = time.monotonic()
        done = subprocess.run(
            [program, *arguments[1:]],
            cwd=self.work,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return Run(done.returncode == 0, done.stdout + done.stderr, time.monotonic() - started)

    def export(self) -> str:
        """Return the exported state of the stack."""
        return self.pulumi("stack", "export", "--stack", self.stack).stdout

    def resources(self) -> list[dict[str, Any]]:
        """Return the resources in the state."""
        found = json.loads(self.export())["deployment"].get("resources") or []
        return list(found)

    def _create_folder(self) -> None:
        """Copy the settings, because commands change them; link the code, because its bytecode is cached."""
        self.work.mkdir(parents=True)
        self.link(ROOT)
        # An inline program does not know the project's folder, and copies the image's files below this repository.
        contexts, common = self.work / image.CONTEXTS, ROOT / image.CONTEXTS
        contexts.parent.mkdir()
        common.mkdir(parents=True, exist_ok=True)
        contexts.symlink_to(common)
        for path in ROOT.glob("Pulumi*.yaml"):
            shutil.copy(path, self.work)

    def link(self, root: Path) -> None:
        """Let the project run the program of this folder, which may be of another commit."""
        for name in _LINKED:
            (self.work / name).unlink(missing_ok=True)
            if (root / name).exists():
                (self.work / name).symlink_to(root / name)

    def _run_cli(self, verb: Verb) -> Run:
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

    def _run_live_stack(self, verb: Verb) -> Run:
        """Run `infra.automation` in a separate process; it prints text, so the run has no steps."""
        return self.command("python", "-c", _SCRIPT, verb, self.stack)

    def _run_automation(self, verb: Verb) -> Run:
        """Run the repository's program inline, in this process, which has already imported the SDKs."""
        options = automation.LocalWorkspaceOptions(work_dir=str(self.work), env_vars=_only_pulumi(self.environment))
        stack = automation.select_stack(self.stack, project_name=PROJECT, program=_program, opts=options)
        steps: list[Step] = []
        kind = "resource_pre_event" if verb == "preview" else "res_outputs_event"

        def collect(event: automation.EngineEvent) -> None:
            found = getattr(event, kind)
            if found is not None:
                steps.append(_step(found.metadata.__dict__))

        started = time.monotonic()
        try:
            output = getattr(stack, verb)(on_event=collect, color="never").stdout
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
    """Return the environment without the user's own Pulumi settings."""
    return {key: value for key, value in environment.items() if not key.startswith("PULUMI_")}


def _only_pulumi(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that differ from this process; the Automation API adds them to its environment."""
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}
