"""`python -m infra doctor`: selects the checks of a stack, runs them in order and shows the findings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra import cost, stack_files
from infra import stack as stacks
from infra.automation import LiveStack, OperationError, StackOutputs
from infra.automation.display import Silent
from infra.config.checks import ACCESS_KEY, BUDGET_KEY
from infra.config.problems import Problem, SettingsError
from infra.doctor import cluster, guides, images, job, runner, tools
from infra.exit_codes import CHECK_FAILED, PROBLEM_FOUND, SUCCESS
from infra.findings.common_causes import BUDGET, SETTING, STATE
from infra.findings.model import (
    Check,
    CloudDoctor,
    Context,
    Finding,
    QueryFailedError,
    Status,
    ok,
    problem,
    skipped,
    with_check_name,
)

#: Width of the table in a file, so that few lines are folded.
_FILE_WIDTH = 220
_STYLES: Mapping[Status, str] = {"ok": "green", "problem": "bold red", "unknown": "yellow", "skipped": "dim"}
_LABELS: Mapping[Status, str] = {"ok": "ok", "problem": "PROBLEM", "unknown": "unknown", "skipped": "-"}
_SUMMARY: Mapping[Status, str] = {"problem": "to fix", "unknown": "not checked", "ok": "ok", "skipped": "skipped"}


def run(arguments: argparse.Namespace) -> int:
    """Run the doctor's command and return the exit code."""
    if arguments.markdown:
        for path in guides.rewrite():
            sys.stdout.write(f"{path} rewritten\n")
        return SUCCESS
    if not arguments.stack:
        known = ", ".join(stack_files.list_stacks(arguments.cwd)) or "none"
        raise ValueError(f"--stack is missing; stacks with a file: {known}")
    found = examine(arguments.stack, arguments.cwd, arguments.timeout)
    code = exit_code(found)
    if arguments.json:
        rows = [dataclasses.asdict(item) for item in found]
        sys.stdout.write(json.dumps({"stack": arguments.stack, "exit_code": code, "checks": rows}, indent=2) + "\n")
    else:
        show(arguments.stack, found, code)
    return code


def exit_code(found: Sequence[Finding]) -> int:
    """Return the exit code for findings; a problem counts more than a check that could not run."""
    states = {item.status for item in found}
    return PROBLEM_FOUND if "problem" in states else CHECK_FAILED if "unknown" in states else SUCCESS


def examine(name: str, folder: Path = stack_files.ROOT, seconds: float | None = None) -> list[Finding]:
    """Return every finding about stack `name`; raise ValueError if there is no such stack."""
    stack_files.require_file(name, folder)
    settings = _CheckedSettings(stack_files.read(name, None, folder))
    doctor = settings.stack.cloud.doctor
    state = _StackState(name, folder)
    first = [
        *tools.checks(doctor.PACKAGES if doctor else ()),
        Check("settings", settings.findings),
        Check("state", state.check, needs="pulumi"),
    ]
    found = runner.run(_limit(first, seconds), f"stack {name}: this machine")
    if not settings.usable:
        return [*found, *with_check_name("cloud", skipped("not checked: fix the settings first"))]
    second = [Check("budget", lambda: budget(settings)), *_stack_checks(settings, state, doctor)]
    return [*found, *runner.run(_limit(second, seconds), f"stack {name}: {settings.stack.cloud.name}")]


@dataclass
class _CheckedSettings:
    """A stack's settings and their problems."""

    configuration: stack_files.Configuration
    stack: stacks.Stack = field(init=False)
    problems: Sequence[Problem] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Parse the configuration, with examples instead of invalid values."""
        try:
            self.stack = self.configuration.parse([stacks.find_access_problems])
        except SettingsError as error:
            self.problems = error.problems
            self.stack = self.configuration.parse_leniently()

    @property
    def usable(self) -> bool:
        """Return whether further checks make sense: they do if at most the budget or the way to the API is wrong."""
        return all(item.key in (ACCESS_KEY, BUDGET_KEY) for item in self.problems)

    def findings(self) -> list[Finding]:
        """Check all settings except the budget."""
        invalid = [item for item in self.problems if item.key != BUDGET_KEY]
        if invalid:
            return [problem(SETTING, item.summary, fix=item.fix) for item in invalid]
        read = self.configuration
        count = sum(key.startswith(f"{read.project}:") for key in read.values)
        return [ok(f"{count} keys of Pulumi.{read.stack}.yaml and Pulumi.yaml are valid")]


@dataclass
class _StackState:
    """The stack's state in the backend; `outputs` are those of the last `up`, None before it."""

    name: str
    folder: Path
    outputs: StackOutputs | None = None

    def check(self) -> Finding:
        """Read the outputs, and report whether the stack is up."""
        try:
            self.outputs = LiveStack(self.name, folder=self.folder, display=Silent()).outputs_if_up()
        except OperationError as error:
            message, _, fix = str(error).partition(". Fix: ")
            fix = fix or "pulumi login; pulumi stack ls"
            raise QueryFailedError(STATE, " ".join(message.split()), is_problem=True, fix=fix) from None
        if self.outputs is None:
            return ok("not up yet: the following checks cover what `up` needs")
        return ok(f"up in {self.outputs.account}, cluster {self.outputs.cluster_name}")


def _stack_checks(settings: _CheckedSettings, state: _StackState, doctor: CloudDoctor | None) -> list[Check]:
    """Return the checks of the cloud account and the image and, if the stack is up, of the cluster and the job."""
    name, job_section = settings.configuration.stack, settings.stack.sections["job"].model_extra or {}
    outputs = dataclasses.asdict(state.outputs) if state.outputs else None
    context = Context(settings.stack.settings, settings.configuration.values, job_section, outputs)
    found = [*(doctor.checks(context) if doctor else ()), _image_check(context, doctor)]
    if outputs and not outputs["kubeconfig"]:
        found.append(Check("job", lambda: skipped("runs on a service of the cloud: see the stack's next_steps")))
    elif outputs:
        devices = doctor.devices(context.settings) if doctor else {}
        found += cluster.checks(context, devices, str(outputs["kubeconfig"]), settings.stack.cloud.login)
        found += job.checks(name, needs=cluster.SERVER)
    return found


def _image_check(context: Context, doctor: CloudDoctor | None) -> Check:
    """Return the check of the existing image, or of the builder if the stack builds its image."""
    image = context.job.get("image")
    login: images.Login = (lambda host: doctor.login(context, host)) if doctor else (lambda _: None)
    if image:
        return Check("image", lambda: images.exists(str(image), login))
    return Check("image", lambda: tools.builder(context))


def _limit(checks: Sequence[Check], seconds: float | None) -> list[Check]:
    """Return the checks with another time limit, if one is given."""
    return [replace(check, seconds=seconds) for check in checks] if seconds else list(checks)


def budget(checked: _CheckedSettings) -> Finding:
    """Compare the hourly cost with the budget."""
    settings = checked.stack.settings
    nodes, limit = settings.gpu.nodes, settings.budget.max_usd_per_hour
    exceeded = [item for item in checked.problems if item.key == BUDGET_KEY]
    if exceeded:
        return problem(BUDGET, exceeded[0].summary, fix=exceeded[0].fix)
    billed = [
        cost.HourlyCost(settings.cost_lines(count)).billed(settings.interruptible)
        for count in (nodes.desired, nodes.max)
    ]
    result = f"{billed[0]:.2f} USD/h with {nodes.desired} GPU nodes, {billed[1]:.2f} with {nodes.max} at most"
    return ok(f"{result}; " + (f"the limit is {limit:g}" if limit else f"no limit ({BUDGET_KEY})"))


def show(stack: str, found: Sequence[Finding], code: int) -> None:
    """Print the findings as a table, with a summary line."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("CHECK", "", "RESULT", "WHAT TO DO"):
        table.add_column(column, overflow="fold", no_wrap=column in ("CHECK", ""))
    previous = ""
    for item in found:
        name, previous = ("" if item.check == previous else item.check), item.check
        status = Text(_LABELS[item.status], style=_STYLES[item.status])
        table.add_row(Text(name), status, Text(item.result), Text(item.fix))
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    counts = Counter(item.status for item in found)
    parts = [f"{counts[status]} {text}" for status, text in _SUMMARY.items() if counts[status]]
    console.print(Text(f"\nstack {stack}: {', '.join(parts)}", style="green" if code == SUCCESS else "bold"))
