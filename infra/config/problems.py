"""Mistakes in a stack's settings and the commands that fix them, collected into one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True)
class Problem:
    """One invalid setting: its key, what is wrong, the allowed values, the command that fixes it, the value found."""

    key: str
    message: str
    allowed: str
    fix: str
    value: object = None

    @property
    def summary(self) -> str:
        """Return the problem without its fix."""
        got = "" if self.value is None else f": got {self.value!r}"
        return f"{self.key}: {self.message}{got}; allowed: {self.allowed}"

    def __str__(self) -> str:
        """Return the problem and its fix in one line."""
        return f"{self.summary}. Fix: {self.fix}"


def fix_by_setting(key: str, value: object) -> str:
    """Return the command that sets `key` to an allowed value; named entries are set one by one."""
    if isinstance(value, Mapping):
        return "; ".join(fix_by_setting(f'{key}["{name}"]', inner) for name, inner in value.items())
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"pulumi config set {_path_option(key)}{quote(key)} {quote(text)}"


def fix_by_removing(key: str) -> str:
    """Return the command that removes `key`."""
    return f"pulumi config rm {_path_option(key)}{quote(key)}"


def _path_option(key: str) -> str:
    """Return the option that makes Pulumi read `key` as a path; a key of a provider (`aws:region`) has no path."""
    return "" if ":" in key else "--path "


def quote(word: str) -> str:
    """Quote a word for the shell if it needs quotes; unlike `shlex.quote`, leave a comma bare."""
    safe = word and all(letter.isalnum() or letter in "._:/-,=" for letter in word)
    return word if safe else "'" + word.replace("'", "'\\''") + "'"


class SettingsError(ValueError):
    """All problems of one stack, raised before any resource is registered."""

    def __init__(self, stack: str, problems: Sequence[Problem]) -> None:
        """Build a message with one line per problem."""
        self.problems = tuple(problems)
        count = "1 setting" if len(self.problems) == 1 else f"{len(self.problems)} settings"
        listing = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"stack {stack!r}: {count} to fix\n{listing}")


def keep_first_per_key(problems: Iterable[Problem]) -> list[Problem]:
    """Drop every further problem of a key: fixing the first one may fix the others."""
    by_key: dict[str, Problem] = {}
    for problem in problems:
        by_key.setdefault(problem.key, problem)
    return list(by_key.values())


def find_unused(section: BaseModel, keys: Iterable[str], message: str, prefix: str = "") -> list[Problem]:
    """Return a problem for each key that is set but never read; a key that repeats its default is ignored.

    `keys` are paths within `section`; a path to a whole section stands for all its keys.
    """
    return [
        Problem(key, message, "unset", fix_by_removing(key), value)
        for name in keys
        for key, value in _non_defaults(section, name, prefix + name)
    ]


def _non_defaults(section: BaseModel, path: str, full_path: str) -> list[tuple[str, object]]:
    """Return the keys at or below a path whose value differs from the default, with that value."""
    first, _, rest = path.partition(".")
    value = getattr(section, first)
    if rest:
        return _non_defaults(value, rest, full_path)
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        return [found for name in names for found in _non_defaults(value, name, f"{full_path}.{name}")]
    default = type(section).model_fields[first].get_default(call_default_factory=True)
    return [] if value == default else [(full_path, value)]
