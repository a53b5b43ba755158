"""Merges defaults < configuration file < environment < command line into one TrainConfig, and says what is wrong in one
line."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from trainer.config import TrainConfig, leaves
from trainer.errors import UserError

ENV_PREFIX = "TRAINER_"
_LEAVES = leaves()


def option_name(path: Sequence[str]) -> str:
    """`("train", "batch_size")` -> `train.batch-size`, the spelling of the command line and of messages."""
    return ".".join(path).replace("_", "-")


def env_name(path: Sequence[str]) -> str:
    """`("train", "batch_size")` -> `TRAINER_TRAIN__BATCH_SIZE`."""
    return ENV_PREFIX + "__".join(path).upper()


def load_config(arguments: Sequence[str], environ: Mapping[str, str]) -> TrainConfig:
    """The effective configuration; raises UserError that names every option in the wrong."""
    file, assignments = _split_arguments(arguments)
    said_by = "--config" if file else ENV_PREFIX + "CONFIG"
    file = file or environ.get(ENV_PREFIX + "CONFIG")
    tree = read_file(Path(file), said_by) if file else {}
    for path, text in _from_environment(environ):
        _assign(tree, path, _parse(path, text), env_name(path))
    for path, text in assignments:
        _assign(tree, path, _parse(path, text), "--" + option_name(path))
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> TrainConfig:
    """A TrainConfig out of nested mappings; raises UserError with one line per problem."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_describe(error.errors(), tree))) from None


def read_file(path: Path, said_by: str = "--config") -> dict[str, Any]:
    """The tree in a .json, .toml, .yaml or .yml file that the option or variable `said_by` names."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{said_by} {path}: cannot be read ({error})") from None
    try:
        tree = _parse_file(path.suffix.lower(), text)
    except UserError as error:
        raise UserError(f"{said_by} {path}: {error}") from None
    except ValueError as error:
        raise UserError(f"{said_by} {path}: is not valid {path.suffix.lstrip('.')}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{said_by} {path}: holds {type(tree).__name__}; legal: a mapping with sections of the tree")
    return tree


def _parse_file(suffix: str, text: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    raise UserError(f"has the ending {suffix or 'none'}; legal: .json, .toml, .yaml, .yml")


def _split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[tuple[tuple[str, ...], str]]]:
    """`--config FILE` and `--section.option VALUE` or `--section.option=VALUE` pairs, in order."""
    by_name = {option_name(path): path for path in _LEAVES}
    file: str | None = None
    assignments: list[tuple[tuple[str, ...], str]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}: options are written --section.option VALUE; see --help")
        name, equals, value = argument[2:].partition("=")
        name = name.replace("_", "-")
        if name != "config" and name not in by_name:
            raise UserError(
                f"unknown option --{name}{_suggest(name, by_name)}; `python -m trainer train --help` lists all"
            )
        if not equals:
            if not rest or (rest[0].startswith("--") and "." in rest[0]):
                raise UserError(f"option --{name} lacks a value")
            value = rest.pop(0)
        if name == "config":
            file = value
        else:
            assignments.append((by_name[name], value))
    return file, assignments


def _from_environment(environ: Mapping[str, str]) -> list[tuple[tuple[str, ...], str]]:
    by_name = {env_name(path): path for path in _LEAVES}
    found = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name == ENV_PREFIX + "CONFIG":
            continue
        if name not in by_name:
            close = _suggest(name, by_name, prefix="")
            raise UserError(
                f"unknown environment variable {name}{close}: names that start with {ENV_PREFIX} are options"
            )
        found.append((by_name[name], environ[name]))
    return found


def _suggest(name: str, known: Mapping[str, Any], prefix: str = "--") -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [tails[tail] for tail in difflib.get_close_matches(name.rsplit(".", 1)[-1], tails, n=1, cutoff=0.7)]
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def _parse(path: tuple[str, ...], text: str) -> Any:
    """JSON where the text is JSON (numbers, lists, true, null), else the text; an option of type text is never JSON."""
    kinds = _kinds(_LEAVES[path].annotation)
    if text.strip().lower() in ("none", "null") and type(None) in kinds:
        return None
    if kinds <= {str, type(None)}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kinds(annotation: Any) -> set[Any]:
    """The types that an option takes."""
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}


def _assign(tree: dict[str, Any], path: tuple[str, ...], value: Any, said_by: str) -> None:
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"{said_by}: the configuration file gives {key} as {node!r}, not as a section")
    node[path[-1]] = value


def _describe(problems: Sequence[Mapping[str, Any]], tree: Mapping[str, Any]) -> list[str]:
    """pydantic's errors, one entry per option: the option, what is wrong with it, the value seen."""
    wrong: dict[tuple[str, ...], list[str]] = {}
    rules = []
    for problem in problems:
        location = tuple(str(part) for part in problem["loc"])
        path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in _LEAVES), location)
        if problem["type"] == "value_error" and path not in _LEAVES:
            rules.append(problem["msg"].removeprefix("Value error, "))  # a rule over several options names them itself
        elif problem["type"] == "extra_forbidden" and path not in _LEAVES:
            known = {".".join(leaf[:n]): leaf for leaf in _LEAVES for n in range(1, len(leaf) + 1)}
            name = ".".join(location)
            rules.append(f"unknown key {name}{_suggest(name, known, prefix='')}")
        else:
            wrong.setdefault(path, []).append(_what(problem, ".".join(location[len(path) :])))
    return rules + [
        f"--{option_name(path)}: {'; '.join(_causes(messages))}, got {_seen(tree, path)!r}"
        for path, messages in wrong.items()
    ]


def _what(problem: Any, inside: str) -> str:
    """One error in a few words; `inside` says where in a list or mapping it is."""
    if problem["type"] == "missing":
        return f"lacks {inside}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {inside}"
    message: str = problem["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _causes(messages: Sequence[str]) -> list[str]:
    """Without repetitions, and without pydantic's complaint that a list whose items are wrong is too short."""
    different = list(dict.fromkeys(messages))
    return [m for m in different if "after validation, not" not in m] or different


def _seen(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
