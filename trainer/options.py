"""Merges defaults < configuration file < environment < command line into one TrainConfig, and says what is wrong in one
line."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    file = file or environ.get(ENV_PREFIX + "CONFIG")
    tree = read_file(Path(file)) if file else {}
    for path, text in _from_environment(environ):
        _assign(tree, path, _parse(text), env_name(path))
    for path, text in assignments:
        _assign(tree, path, _parse(text), "--" + option_name(path))
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> TrainConfig:
    """A TrainConfig out of nested mappings; raises UserError with one line per problem."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_describe(problem, tree) for problem in error.errors())) from None


def read_file(path: Path) -> dict[str, Any]:
    """The tree in a .json, .toml, .yaml or .yml file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read ({error})") from None
    try:
        tree = _parse_file(path.suffix.lower(), text)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from None
    except ValueError as error:
        raise UserError(f"--config {path}: is not valid {path.suffix.lstrip('.')}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"--config {path}: holds {type(tree).__name__}; legal: a mapping with the sections of the tree")
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
            raise UserError(
                f"unknown environment variable {name}{_suggest(name, by_name)}: names that start with "
                f"{ENV_PREFIX} are options of the trainer"
            )
        found.append((by_name[name], environ[name]))
    return found


def _suggest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [tails[tail] for tail in difflib.get_close_matches(name.rsplit(".", 1)[-1], tails, n=1, cutoff=0.7)]
    return f" (did you mean {'--' if '.' in close[0] else ''}{close[0]}?)" if close else ""


def _parse(text: str) -> Any:
    """JSON where the text is JSON (numbers, lists, true, null), else the text itself."""
    if text.strip().lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _assign(tree: dict[str, Any], path: tuple[str, ...], value: Any, said_by: str) -> None:
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"{said_by}: the configuration file gives {key} as {node!r}, not as a section")
    node[path[-1]] = value


def _describe(problem: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """One pydantic error as: the option, what is wrong, the value seen."""
    location = tuple(str(part) for part in problem["loc"])
    path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in _LEAVES), location)
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = {option_name(leaf): leaf for leaf in _LEAVES}
        name = option_name(location)
        return f"unknown option {name}{_suggest(name, known)}"
    if problem["type"] == "value_error" and path not in _LEAVES:
        return message  # a rule over several options names them itself
    return f"--{option_name(path)}: {message[:1].lower()}{message[1:]}, got {_seen(tree, path)!r}"


def _seen(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
