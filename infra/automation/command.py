"""The engine's verbs on the command line: progress on stderr, the result on stdout, questions on a terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping

from infra.automation.display import Display
from infra.automation.errors import CancelledError, OperationError
from infra.automation.outputs import StackOutputs
from infra.automation.stack import Approve, Changes, LiveStack
from infra.config.problems import SettingsError
from infra.exit_codes import INTERRUPTED, SUCCESS, USER_ERROR


def run(arguments: argparse.Namespace, settings: Mapping[str, str]) -> int:
    """Run the command and return its exit status."""
    display = Display()
    try:
        _VERBS[arguments.command](arguments, settings, display)
    except OperationError as error:
        display.print_line(f"error: {error}")
        return error.exit_code
    except (SettingsError, ValueError) as error:
        display.print_line(f"error: {error}")
        return USER_ERROR
    except KeyboardInterrupt:
        display.print_line("error: cancelled")
        return INTERRUPTED
    return SUCCESS


def _open_stack(
    arguments: argparse.Namespace, display: Display, settings: Mapping[str, str] | None = None
) -> LiveStack:
    pack, rules = getattr(arguments, "policy_pack", None), getattr(arguments, "policy_config", None)
    if rules and not pack:
        raise OperationError(f"--policy-config without a policy pack: got {rules}. Fix: add --policy-pack")
    for path in filter(None, (pack, rules)):
        if not path.exists():
            raise OperationError(f"{path} does not exist")
    return LiveStack(
        arguments.stack,
        settings,
        folder=arguments.cwd,
        display=display,
        policy_packs=[pack] if pack else [],
        policy_configs=[rules] if rules else [],
        secrets_provider=getattr(arguments, "secrets_provider", None),
    )


def _preview(arguments: argparse.Namespace, settings: Mapping[str, str], display: Display) -> None:
    _print_changes(_open_stack(arguments, display, settings).preview(), arguments)


def _up(arguments: argparse.Namespace, settings: Mapping[str, str], display: Display) -> None:
    stack = _open_stack(arguments, display, settings)
    approve = None if arguments.yes else _ask_for_approval(arguments.stack)
    _print_outputs(stack.up(approve, arguments.replace), arguments, secrets=False)


def _refresh(arguments: argparse.Namespace, _: Mapping[str, str], display: Display) -> None:
    _print_changes(_open_stack(arguments, display).refresh(), arguments)


def _destroy(arguments: argparse.Namespace, _: Mapping[str, str], display: Display) -> None:
    if not arguments.yes:
        name = _ask(f"This deletes all resources of stack {arguments.stack}. Type its name to continue: ")
        if name != arguments.stack:
            raise CancelledError(f"{name!r} is not {arguments.stack!r}; nothing was changed")
    _print_changes(_open_stack(arguments, display).destroy(), arguments)


def _outputs(arguments: argparse.Namespace, _: Mapping[str, str], display: Display) -> None:
    _print_outputs(_open_stack(arguments, display).outputs(), arguments, secrets=arguments.show_secrets)


def _tunnel(arguments: argparse.Namespace, _: Mapping[str, str], display: Display) -> None:
    """Hold the tunnel until Ctrl-C, its normal end."""
    line = "open: kubectl and pulumi reach the cluster at https://127.0.0.1:{port} until Ctrl-C"
    try:
        _open_stack(arguments, display).hold_tunnel(lambda found: display.print_line(line.format(port=found.port)))
    except KeyboardInterrupt:
        display.print_line("closed")


_VERBS: dict[str, Callable[[argparse.Namespace, Mapping[str, str], Display], None]] = {
    "preview": _preview,
    "up": _up,
    "refresh": _refresh,
    "destroy": _destroy,
    "outputs": _outputs,
    "tunnel": _tunnel,
}


def _ask_for_approval(stack: str) -> Approve:
    """Return a function that asks whether to apply a preview; a preview without changes needs no answer."""
    _require_terminal()
    return lambda changes: not changes or _ask(f"Do this to stack {stack}? [y/N] ").lower() in {"y", "yes"}


def _require_terminal() -> None:
    if not sys.stdin.isatty():
        raise OperationError("no terminal to ask for confirmation. Fix: add --yes, which continues without asking")


def _ask(question: str) -> str:
    _require_terminal()
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip()


def _print_changes(changes: Changes, arguments: argparse.Namespace) -> None:
    if arguments.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(changes), indent=2) + "\n")


def _print_outputs(outputs: StackOutputs, arguments: argparse.Namespace, *, secrets: bool) -> None:
    values = outputs.as_dict(secrets=secrets)
    if arguments.json:
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
        return
    steps = values.pop("next_steps")
    for key, value in values.items():
        parts = [f"{name} {_or_dash(item)}" for name, item in value.items()] if isinstance(value, dict) else [value]
        sys.stdout.write(f"{key:<16} {', '.join(_or_dash(part) for part in parts)}\n")
    assert isinstance(steps, (list, tuple))
    sys.stdout.write("".join(["next steps:\n", *(f"  {step}\n" for step in steps)]))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
