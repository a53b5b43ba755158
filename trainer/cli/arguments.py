"""Argument parsers of the commands that are not training jobs; they report mistakes in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import UserError


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows a default only if there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default in (None, False, ()) or action.required
        return action.help if empty else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises UserError and reads more options from `--config FILE`."""

    def __init__(self, command: str, summary: str) -> None:
        super().__init__(
            prog=f"python -m trainer {command}",
            description=summary,
            allow_abbrev=False,
            formatter_class=_Help,
        )
        self._command = command
        self.add_argument(
            "--config",
            type=Path,
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="read options from a .json, .toml or .yaml file, as names without dashes; the command line wins",
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options; raise UserError for an unknown, missing or invalid one."""
        found, unknown = self.parse_known_args([*self._from_file(arguments), *arguments])
        if unknown:
            name = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(name, self._names(), n=1, cutoff=0.6)
            hint = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"unknown option {name}{hint}; allowed: {', '.join(self._names())}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing argparse's usage text and exiting."""
        raise UserError(f"{self._command}: {message}. Fix: see `{self.prog} --help`")

    def _names(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings if option not in ("-h",)]

    def _from_file(self, arguments: Sequence[str]) -> list[str]:
        """Return the options in the file of --config as arguments."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config", type=Path)
        try:
            path = finder.parse_known_args(list(arguments))[0].config
        except argparse.ArgumentError as error:
            self.error(str(error))
        if path is None:
            return []
        from trainer.config.options import read_file

        return [word for name, value in read_file(path).items() for word in self._as_arguments(name, value, path)]

    def _as_arguments(self, name: str, value: Any, path: Path) -> list[str]:
        option = "--" + name.replace("_", "-")
        action = self._option_string_actions.get(option)
        if action is None or option in ("--config", "--help"):
            close = difflib.get_close_matches(option, self._names(), n=1, cutoff=0.6)
            hint = f" (did you mean {close[0][2:]}?)" if close else ""
            self.error(f"--config {path}: unknown key {name}{hint}")
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"--config {path}: wrong value of {name}: got {value!r}; allowed: true, false")
            return [option] if value else []
        if value is None:
            return []
        return [f"{option}={','.join(map(str, value)) if isinstance(value, list) else value}"]


def integer_from(least: int) -> Any:
    """Return an option type: an integer of at least `least`."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an integer of {least} or more")
        return int(text)

    return parse


def number_above(bound: float) -> Any:
    """Return an option type: a number above `bound`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not bound < value < float("inf"):
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number above {bound:g}")
        return value

    return parse


def integers_from(least: int) -> Any:
    """Return an option type: integers of at least `least`, separated by commas."""
    parse_one = integer_from(least)

    def parse(text: str) -> tuple[int, ...]:
        return tuple(parse_one(part.strip()) for part in text.strip("[]").split(","))

    return parse
