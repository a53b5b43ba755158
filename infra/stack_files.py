"""A stack's configuration read from its files, as the engine hands it to the program; nothing is started for it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from infra import stack as checked
from infra.config.problems import Problem, SettingsError

ROOT = Path(__file__).resolve().parents[1]
#: What a value that only the engine can decrypt is read as.
ENCRYPTED = "[secret]"
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class _Elsewhere(BaseModel):
    """A section whose keys another part of the project checks, when the program runs."""

    model_config = ConfigDict(frozen=True, extra="allow")


#: The sections that the workloads own.
ELSEWHERE: Mapping[str, type[BaseModel]] = {"job": _Elsewhere, "trainer": _Elsewhere}


@dataclass(frozen=True)
class Configuration:
    """One stack's configuration: `values` maps `namespace:key` to text."""

    project: str
    stack: str
    values: Mapping[str, str]
    overrides: frozenset[str] = frozenset()

    def parse(self) -> checked.Stack:
        """The checked settings of the cluster; SettingsError names every problem."""
        try:
            return checked.parse(self.values, self.project, self.stack, ELSEWHERE)
        except SettingsError as error:
            raise SettingsError(self.stack, [self._where_it_was_set(problem) for problem in error.problems]) from None

    def repaired(self) -> checked.Stack:
        """The same, with stand-ins for what is wrong: for those who only need what is right."""
        return checked.repaired(self.values, self.project, self.stack, ELSEWHERE)

    def _where_it_was_set(self, problem: Problem) -> Problem:
        """The problem with a fix for the command line, where that is where the key was given."""
        if problem.key not in self.overrides:
            return problem
        *_, key, value = shlex.split(problem.fix)
        legal = f"--set {key}={value}" if key == problem.key else f"leave --set {problem.key}=... out"
        return replace(problem, fix=legal)


def files(folder: Path = ROOT) -> list[str]:
    """Names of the stacks that have a file of settings."""
    return sorted(path.name.split(".")[1] for path in folder.glob("Pulumi.*.yaml"))


def read(name: str, overrides: Mapping[str, object] | None = None, folder: Path = ROOT) -> Configuration:
    """Configuration of stack `name`: its file, the project's defaults, then `overrides` (paths to values)."""
    described = _document(folder / "Pulumi.yaml")
    project = str(described["name"])
    values: object = _section(_document(folder / f"Pulumi.{name}.yaml"), "config")
    for path, declared in _section(described, "config").items():
        if isinstance(declared, dict) and "default" in declared:
            values = _with(values, _parts(path, project), declared["default"], only_if_absent=True)
    given = frozenset(path.removeprefix(f"{project}:") for path in overrides or {})
    for path, value in (overrides or {}).items():
        values = _with(values, _parts(path, project), value)
    assert isinstance(values, dict), "every path begins with a key"
    return Configuration(project, name, {key: _text(_plain(value)) for key, value in values.items()}, given)


def assignments(texts: list[str]) -> dict[str, str]:
    """`key=value` words as a mapping; ValueError names the one that is not."""
    for text in texts:
        if not re.fullmatch(r"[^=]+=.*", text, re.DOTALL):
            raise ValueError(f"--set {text!r} is not key=value, for example --set gpu.nodes.max=4")
    return {key.strip(): value for key, _, value in (text.partition("=") for text in texts)}


def _document(path: Path) -> dict[str, object]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return document if isinstance(document, dict) else {}


def _section(document: Mapping[str, object], key: str) -> dict[str, object]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _parts(path: str, project: str) -> list[str | int]:
    """`gpu.nodes[0]` as parts, the first with its namespace."""
    namespace, _, inner = path.rpartition(":")
    parts: list[str | int] = [word or int(index) for word, index in _PART.findall(inner)]
    if not parts or not isinstance(parts[0], str):
        raise ValueError(f"--set {path!r} is not a key, for example gpu.nodes.max or network.authorized_cidrs[0]")
    return [f"{namespace or project}:{parts[0]}", *parts[1:]]


def _with(container: object, parts: list[str | int], value: object, *, only_if_absent: bool = False) -> object:
    """A copy of nested maps and lists with the value at a path, what is missing on the way made."""
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
    """What an entry holds; `{secure: ...}` cannot be read here."""
    if isinstance(value, dict) and set(value) == {"secure"}:
        return ENCRYPTED
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _text(value: object) -> str:
    """The engine's spelling: JSON for structures, `true` and `false`, plain text otherwise."""
    return json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)
