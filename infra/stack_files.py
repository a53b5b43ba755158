"""Reads a stack's configuration from `Pulumi.yaml` and `Pulumi.<stack>.yaml` without starting the engine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from infra import stack as stacks
from infra.config.problems import Problem, SettingsError, quote

ROOT = Path(__file__).resolve().parents[1]
#: Stands for a value that only the engine can decrypt.
ENCRYPTED = "[secret]"
#: The form of booleans and numbers, and their first letters.
_RESOLVERS: Mapping[str, tuple[str, str]] = {
    "tag:yaml.org,2002:bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "tag:yaml.org,2002:int": (r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0[0-7_]+)$", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
}
_NAMESPACE = re.compile(r"([^.:\[\]\"]+):")
#: One step of a path as `pulumi config set --path` reads it: a key, an index, or a key in brackets.
_PART = re.compile(r'(?:^|\.)(?P<key>[^.\[\]"]+)|\[(?P<index>\d+)\]|\["(?P<quoted>(?:[^"\\]|\\.)*)"\]')


class _Loader(yaml.SafeLoader):
    """Reads plain words as Pulumi does (YAML 1.2): 12:30 is text instead of 750, and yes is text instead of true."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag not in _RESOLVERS]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_pattern, _letters) in _RESOLVERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_letters))


class _AnyKeys(BaseModel):
    """A section whose keys are not checked."""

    model_config = ConfigDict(frozen=True, extra="allow")


#: The sections of the workloads, which check them when the Pulumi program runs.
UNCHECKED_SECTIONS: Mapping[str, type[BaseModel]] = {"job": _AnyKeys, "trainer": _AnyKeys}


@dataclass(frozen=True)
class Configuration:
    """One stack's raw configuration: `values` maps `namespace:key` to text, `overrides` are the keys from `--set`."""

    project: str
    stack: str
    values: Mapping[str, str]
    overrides: frozenset[str] = frozenset()

    def parse(self, further: Sequence[stacks.Check] = ()) -> stacks.Stack:
        """Return the checked settings of the cluster; raise SettingsError with all problems, also of `further`."""
        try:
            return stacks.parse(self.values, self.project, self.stack, UNCHECKED_SECTIONS, further)
        except SettingsError as error:
            problems = [self._fix_where_set(problem) for problem in error.problems]
            raise SettingsError(self.stack, problems) from None

    def parse_leniently(self) -> stacks.Stack:
        """Return the settings with examples instead of invalid values, for callers that do not need those values."""
        return stacks.parse_leniently(self.values, self.project, self.stack, UNCHECKED_SECTIONS)

    def own_values(self) -> dict[str, object]:
        """Return the values of the project's own keys, with structured values decoded."""
        return stacks.decode(self.values, self.project)[0]

    def _fix_where_set(self, problem: Problem) -> Problem:
        """Replace commands for keys from the command line, which the options override, with corrected options."""
        fixes = [self._as_option(command, problem.key) for command in problem.fix.split("; ")]
        return replace(problem, fix="; ".join(dict.fromkeys(fixes)))

    def _as_option(self, command: str, problem_key: str) -> str:
        """Return the option that does the same as a command, or the command if no option concerns its key."""
        if not command.startswith(("pulumi config set ", "pulumi config rm ")):
            return command
        words = shlex.split(command)
        removes = words[2] == "rm"
        key, value = (words[-1], "") if removes else words[-2:]
        options = sorted(option for option in self.overrides if self._overlap(option, key))
        if removes:
            return " and ".join(f"leave --set {option}=... out" for option in options) or command
        if not options and not any(self._overlap(option, problem_key) for option in self.overrides):
            return command
        return f'--set "{key}={value}"' if value.startswith("$(") else f"--set {quote(f'{key}={value}')}"

    def _overlap(self, option: str, key: str) -> bool:
        """Return whether one of two paths is the other one, or the path of a section around it."""
        try:
            one, two = _parts(option, self.project), _parts(key, self.project)
        except ValueError:
            return False
        shorter = min(len(one), len(two))
        return one[:shorter] == two[:shorter]


def list_stacks(folder: Path = ROOT) -> list[str]:
    """Return the names of the stacks that have a configuration file."""
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))


def require_file(name: str, folder: Path = ROOT) -> None:
    """Raise ValueError unless stack `name` has a configuration file."""
    stacks_with_file = list_stacks(folder)
    if name not in stacks_with_file:
        raise ValueError(f"no file Pulumi.{name}.yaml; stacks with a file: {', '.join(stacks_with_file) or 'none'}")


def read(name: str, overrides: Mapping[str, object] | None = None, folder: Path = ROOT) -> Configuration:
    """Read stack `name`: its file, then the project's defaults, then `overrides` (key paths to values)."""
    described = _load_yaml(folder / "Pulumi.yaml")
    project = str(described["name"])
    values: object = _section(_load_yaml(folder / f"Pulumi.{name}.yaml"), "config")
    for path, declared in _section(described, "config").items():
        if isinstance(declared, dict) and "default" in declared:
            values = _with(values, _parts(path, project), declared["default"], only_if_absent=True)
    given = frozenset(path.removeprefix(f"{project}:") for path in overrides or {})
    for path, value in (overrides or {}).items():
        values = _with(values, _parts(path, project), value)
    assert isinstance(values, dict), "every path begins with a key"
    return Configuration(project, name, {key: _text(_plain(value)) for key, value in values.items()}, given)


def parse_assignments(texts: list[str]) -> dict[str, str]:
    """Return `key=value` words as a mapping; raise ValueError for a word of another form."""
    for text in texts:
        if not re.fullmatch(r"[^=]+=.*", text, re.DOTALL):
            raise ValueError(f"--set {text!r} is not key=value, for example --set gpu.nodes.max=4")
    return {key.strip(): value for key, _, value in (text.partition("=") for text in texts)}


def _load_yaml(path: Path) -> dict[str, object]:
    """Return a file's mapping, empty if it is another document; raise ValueError if the file cannot be read."""
    try:
        document = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return document if isinstance(document, dict) else {}


def _section(document: Mapping[str, object], key: str) -> dict[str, object]:
    """Return the mapping at `key`, empty if there is none."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _parts(path: str, project: str) -> list[str | int]:
    """Split a path such as `network.zones[0]` or `tags.extra["team"]`; the first part gets its namespace."""
    found = _NAMESPACE.match(path)
    namespace, inner = (found[1], path[found.end() :]) if found else (project, path)
    parts: list[str | int] = []
    position = 0
    while position < len(inner) and (step := _PART.match(inner, position)):
        quoted, index = step["quoted"], step["index"]
        parts.append(int(index) if index else step["key"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted))
        position = step.end()
    if position < len(inner) or not parts or not isinstance(parts[0], str):
        raise ValueError(f"--set {path!r} is not a key, for example gpu.nodes.max or network.authorized_cidrs[0]")
    return [f"{namespace}:{parts[0]}", *parts[1:]]


def _with(container: object, parts: list[str | int], value: object, *, only_if_absent: bool = False) -> object:
    """Return a copy of nested maps and lists with the value at a path, creating missing levels."""
    if not parts:
        return container if only_if_absent and container is not None else value
    head, rest = parts[0], parts[1:]
    if isinstance(head, int):
        items = list(container) if isinstance(container, list) else []
        items += [None] * (head + 1 - len(items))
        items[head] = _with(items[head], rest, value, only_if_absent=only_if_absent)
        return items
    entries = dict(container) if isinstance(container, dict) else {}
    entries[head] = _with(entries.get(head), rest, value, only_if_absent=only_if_absent)
    return entries


def _plain(value: object) -> object:
    """Replace each encrypted value (`{secure: ...}`) with the placeholder."""
    if isinstance(value, dict) and set(value) == {"secure"}:
        return ENCRYPTED
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _text(value: object) -> str:
    """Return a value as the engine spells it: JSON for structures and booleans, plain text otherwise."""
    return json.dumps(value, default=str) if isinstance(value, (dict, list, bool)) else str(value)
