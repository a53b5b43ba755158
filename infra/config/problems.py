"""Mistakes in a stack's settings, collected and told all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True)
class Problem:
    """One setting to mend: its key, what is wrong with the value seen, what is legal, the command that mends it."""

    key: str
    wrong: str
    legal: str
    mend: str
    seen: object = None

    def __str__(self) -> str:
        shown = "" if self.seen is None else f" = {self.seen!r}"
        return f"{self.key}{shown}: {self.wrong}\n    legal: {self.legal}\n    mend:  {self.mend}"


def mend(key: str, value: object) -> str:
    """The command that gives `key` a legal value; a key with a namespace (`provider:key`) has no path."""
    path = "" if ":" in key else "--path "
    return f"pulumi config set {path}{_quote(key)} {_quote(str(value))}"


def unset(key: str) -> str:
    """The command that removes `key`."""
    path = "" if ":" in key else "--path "
    return f"pulumi config rm {path}{_quote(key)}"


def _quote(word: str) -> str:
    safe = word and all(letter.isalnum() or letter in "._:/-," for letter in word)
    return word if safe else "'" + word.replace("'", "'\\''") + "'"


class SettingsError(ValueError):
    """Every problem of one stack; raised before any resource is registered."""

    def __init__(self, stack: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 setting" if len(self.problems) == 1 else f"{len(self.problems)} settings"
        listing = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"stack {stack!r}: {count} to mend\n{listing}")


def first_of_each(problems: Iterable[Problem]) -> list[Problem]:
    """The problems without a second one about a key already named: mending the first comes first."""
    by_key: dict[str, Problem] = {}
    for problem in problems:
        by_key.setdefault(problem.key, problem)
    return list(by_key.values())


def unused(section: BaseModel, keys: Iterable[str], wrong: str, prefix: str = "") -> list[Problem]:
    """Keys of a section, or of a whole section in it, that nothing would read; one that says the default is let be."""
    return [
        Problem(key, wrong, "unset", unset(key), value)
        for name in keys
        for key, value in _given(section, name, prefix + name)
    ]


def _given(section: BaseModel, path: str, full: str) -> list[tuple[str, object]]:
    """Keys at or below a path that have another value than their default, with it."""
    first, _, rest = path.partition(".")
    value = getattr(section, first)
    if rest:
        return _given(value, rest, full)
    if isinstance(value, BaseModel):
        return [found for name in type(value).model_fields for found in _given(value, name, f"{full}.{name}")]
    return [] if value == type(section).model_fields[first].get_default(call_default_factory=True) else [(full, value)]
