"""`python -m infra doctor`: which checks a stack gets, in which order, and how the result is shown."""

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

from infra import cost
from infra import stack as stacks
from infra import stack_files as configuration
from infra.automation import LiveStack, OperationError, StackOutputs
from infra.automation.display import Silent
from infra.config.problems import Problem, SettingsError
from infra.doctor import cluster, guides, images, job, runner, tools
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

FINE, PROBLEMS, COULD_NOT_RUN = 0, 1, 2
#: A file has no width, and few lines of it should be folded.
_WIDE = 220
_BUDGET_KEY = "budget.max_usd_per_hour"
_COLOURS: Mapping[Status, str] = {"ok": "green", "problem": "bold red", "unknown": "yellow", "skipped": "dim"}
_WORDS: Mapping[Status, str] = {"ok": "ok", "problem": "PROBLEM", "unknown": "not known", "skipped": "-"}


def run(arguments: argparse.Namespace) -> int:
    """Look at everything and show it; the exit status."""
    if arguments.markdown:
        for path in guides.rewrite():
            sys.stdout.write(f"{path} rewritten\n")
        return FINE
    if not arguments.stack:
        known = ", ".join(configuration.list_stacks(arguments.cwd)) or "none"
        raise ValueError(f"--stack is missing; stacks with a file of settings: {known}")
    found = examine(arguments.stack, arguments.cwd, arguments.timeout)
    code = exit_code(found)
    if arguments.json:
        rows = [dataclasses.asdict(item) for item in found]
        sys.stdout.write(json.dumps({"stack": arguments.stack, "exit_code": code, "checks": rows}, indent=2) + "\n")
    else:
        show(arguments.stack, found, code)
    return code


def exit_code(found: Sequence[Finding]) -> int:
    """1 where something is to be fixed, 2 where nothing is and something could not be looked at, else 0."""
    states = {item.status for item in found}
    return PROBLEMS if "problem" in states else COULD_NOT_RUN if "unknown" in states else FINE


def examine(name: str, folder: Path = configuration.ROOT, seconds: float | None = None) -> list[Finding]:
    """Every finding about stack `name`; ValueError where there is no such stack."""
    if name not in configuration.list_stacks(folder):
        known = ", ".join(configuration.list_stacks(folder)) or "none"
        raise ValueError(f"no file Pulumi.{name}.yaml; stacks that have one: {known}")
    read = configuration.read(name, None, folder)
    seen = _Settings(read)
    cloud, doctor = seen.stack.cloud, seen.stack.cloud.doctor
    outputs: list[StackOutputs | None] = [None]
    first = [
        *tools.checks(doctor.PACKAGES if doctor else ()),
        Check("settings", lambda: seen.findings),
        Check("state", lambda: _state(name, folder, outputs), needs="pulumi"),
    ]
    found = runner.run(_limited(first, seconds), f"stack {name}: this machine")
    if not seen.usable:
        rest = "settings come first: nothing else was looked at"
        return [*found, *with_check_name("cloud", skipped(rest))]
    job_section = seen.stack.sections["job"].model_extra or {}
    told = dataclasses.asdict(outputs[0]) if outputs[0] else None
    context = Context(seen.stack.settings, read.values, job_section, told)
    second = [Check("budget", lambda: budget(seen)), *_checks(context, doctor)]
    if told and not told["kubeconfig"]:
        second.append(Check("job", lambda: skipped("it runs on a service of the cloud: see the stack's next_steps")))
    elif told:
        devices = doctor.devices(context.settings) if doctor else {}
        second += cluster.checks(context, devices, str(told["kubeconfig"]), cloud.login)
        second += job.checks(name, needs=cluster.SERVER)
    return [*found, *runner.run(_limited(second, seconds), f"stack {name}: {cloud.name}")]


def _checks(context: Context, doctor: CloudDoctor | None) -> list[Check]:
    """What the cloud itself is asked, and the image, whose registry may be the cloud's."""
    own = list(doctor.checks(context)) if doctor else []
    image = context.job.get("image")
    login: images.Login = (lambda host: doctor.login(context, host)) if doctor else (lambda _: None)
    if image:
        return [*own, Check("image", lambda: images.exists(str(image), login))]
    return [*own, Check("image", lambda: tools.builder(context))]


def _limited(checks: Sequence[Check], seconds: float | None) -> list[Check]:
    return [replace(check, seconds=seconds) for check in checks] if seconds else list(checks)


@dataclass
class _Settings:
    """A stack's settings, with what is wrong with them; `usable` unless more is wrong than the budget."""

    read: configuration.Configuration
    stack: stacks.Stack = field(init=False)
    problems: Sequence[Problem] = field(init=False, default=())

    def __post_init__(self) -> None:
        try:
            self.stack = self.read.parse()
        except SettingsError as error:
            self.problems = error.problems
            self.stack = self.read.parse_leniently()

    @property
    def usable(self) -> bool:
        return all(item.key == _BUDGET_KEY for item in self.problems)

    @property
    def findings(self) -> list[Finding]:
        wrong = [item for item in self.problems if item.key != _BUDGET_KEY]
        if wrong:
            return [problem(SETTING, item.summary, fix=item.fix) for item in wrong]
        keys = sum(key.startswith(f"{self.read.project}:") for key in self.read.values)
        return [ok(f"{keys} keys of Pulumi.{self.read.stack}.yaml and Pulumi.yaml are legal")]


def budget(seen: _Settings) -> Finding:
    """The cost of an hour beside the ceiling."""
    settings = seen.stack.settings
    nodes, ceiling = settings.gpu.nodes, settings.budget.max_usd_per_hour
    over = [item for item in seen.problems if item.key == _BUDGET_KEY]
    if over:
        return problem(BUDGET, over[0].summary, fix=over[0].fix)
    billed = [
        cost.HourlyCost(settings.cost_lines(count)).billed(settings.interruptible)
        for count in (nodes.desired, nodes.max)
    ]
    told = f"{billed[0]:.2f} USD/h with {nodes.desired} GPU nodes, {billed[1]:.2f} with {nodes.max} at most"
    return ok(f"{told}; " + (f"the ceiling is {ceiling:g}" if ceiling else "no ceiling (budget.max_usd_per_hour)"))


def _state(name: str, folder: Path, outputs: list[StackOutputs | None]) -> Finding:
    try:
        outputs[0] = LiveStack(name, folder=folder, display=Silent()).outputs_if_up()
    except OperationError as error:
        what, _, fix = str(error).partition("; run: ")
        raise QueryFailedError(
            STATE, " ".join(what.split()), is_problem=True, fix=fix or "pulumi login; pulumi stack ls"
        ) from None
    if outputs[0] is None:
        return ok("not up yet: what follows is about what `up` will need")
    return ok(f"up in {outputs[0].account}, cluster {outputs[0].cluster_name}")


def show(stack: str, found: Sequence[Finding], code: int) -> None:
    """The table, and one line that sums it up."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("CHECK", "", "RESULT", "WHAT TO DO"):
        table.add_column(column, overflow="fold", no_wrap=column in ("CHECK", ""))
    before = ""
    for item in found:
        name, before = ("" if item.check == before else item.check), item.check
        state = Text(_WORDS[item.status], style=_COLOURS[item.status])
        table.add_row(Text(name), state, Text(item.result), Text(item.fix))
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    counts = Counter(item.status for item in found)
    words = {"problem": "to fix", "unknown": "could not be looked at", "ok": "fine", "skipped": "left out"}
    parts = [f"{counts[status]} {text}" for status, text in words.items() if counts[status]]  # type: ignore[index]
    console.print(Text(f"\nstack {stack}: {', '.join(parts)}", style="green" if code == FINE else "bold"))
