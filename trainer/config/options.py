"""Merge defaults, configuration file, environment and command line into one TrainConfig; the last one wins."""

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
_ALLOWED = "allowed: "


def option_name(path: Sequence[str]) -> str:
    """Return the spelling of the command line and of errors: `train.batch-size` for `("train", "batch_size")`."""
    return ".".join(path).replace("_", "-")


def env_name(path: Sequence[str]) -> str:
    """Return the environment variable of an option: `TRAINER_TRAIN__BATCH_SIZE` for `("train", "batch_size")`."""
    return ENV_PREFIX + "__".join(path).upper()


def load_config(
    arguments: Sequence[str], environ: Mapping[str, str], base: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Return the effective configuration; raise a UserError that names every wrong option.

    `base` replaces the defaults: file, environment and command line win over it, option by option.
    """
    return validate(merge_sources(arguments, environ, base))


def merge_sources(
    arguments: Sequence[str], environ: Mapping[str, str], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options of all sources as a tree that is not validated; see load_config."""
    file, assignments = _split_arguments(arguments)
    origin = "--config" if file else ENV_PREFIX + "CONFIG"
    file = file or environ.get(ENV_PREFIX + "CONFIG")
    tree = _merge(base or {}, read_file(Path(file), origin) if file else {})
    for path, text in _from_environment(environ):
        _assign(tree, path, _parse(path, text), env_name(path))
    for path, text in assignments:
        _assign(tree, path, _parse(path, text), "--" + option_name(path))
    return tree


def load_section(tree: Mapping[str, Any], name: str) -> Any:
    """Return one section of a tree, whatever the other sections hold; raise a UserError like load_config."""
    try:
        return TrainConfig.model_fields[name].annotation.model_validate(tree.get(name, {}))  # type: ignore[union-attr]
    except ValidationError as error:
        located = [{**problem, "loc": (name, *problem["loc"])} for problem in error.errors()]
        raise UserError("; ".join(_describe(located, tree))) from None


def _merge(base: Mapping[str, Any], over: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `base` with the options of `over`; the value of one option is never mixed from both."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        is_section = (*prefix, key) not in _LEAVES
        if is_section and isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge(below, value, (*prefix, key))
        else:
            merged[key] = value
    return merged


def validate(tree: Mapping[str, Any]) -> TrainConfig:
    """Return a TrainConfig from nested mappings; raise a UserError that lists every problem."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_describe(error.errors(), tree))) from None


def read_file(path: Path, origin: str = "--config") -> dict[str, Any]:
    """Return the tree in a .json, .toml, .yaml or .yml file, given by the option or variable `origin`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{origin} {path}: cannot be read: {error}") from None
    try:
        tree = _parse_file(path.suffix.lower(), text)
    except UserError as error:
        raise UserError(f"{origin} {path}: {error}") from None
    except ValueError as error:
        raise UserError(f"{origin} {path}: not valid {path.suffix.lstrip('.')}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{origin} {path}: wrong content: got {type(tree).__name__}; allowed: a mapping of sections")
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
    raise UserError(f"unknown file type: got {suffix or 'none'}; allowed: .json, .toml, .yaml, .yml")


def _split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[tuple[tuple[str, ...], str]]]:
    """Return the file of `--config` and the (path, value) pairs of all other options, in order."""
    by_name = {option_name(path): path for path in _LEAVES}
    file: str | None = None
    assignments: list[tuple[tuple[str, ...], str]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; allowed: --section.option VALUE. Fix: see --help")
        name, equals, value = argument[2:].partition("=")
        name = name.replace("_", "-")
        if name != "config" and name not in by_name:
            raise UserError(
                f"unknown option --{name}{_suggest(name, by_name)}; allowed: see `python -m trainer train --help`"
            )
        if not equals:
            if not rest or (rest[0].startswith("--") and "." in rest[0]):
                raise UserError(f"option --{name} needs a value")
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
                f"unknown environment variable {name}{close}: the prefix {ENV_PREFIX} is reserved for options"
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
    """Parse numbers, lists, true and null as JSON; leave other text, and every value of a text option, unchanged."""
    kinds = _accepted_types(_LEAVES[path].annotation)
    if text.strip().lower() in ("none", "null") and type(None) in kinds:
        return None
    if kinds <= {str, type(None)}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _accepted_types(annotation: Any) -> set[Any]:
    """Return the types that an option accepts."""
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}


def _assign(tree: dict[str, Any], path: tuple[str, ...], value: Any, origin: str) -> None:
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(
                f"{origin}: {key} in the configuration file is not a section: got {node!r}; allowed: a mapping"
            )
    node[path[-1]] = value


def _describe(problems: Sequence[Mapping[str, Any]], tree: Mapping[str, Any]) -> list[str]:
    """Return pydantic's errors as one message per option, with the value and what is allowed."""
    messages_by_option: dict[tuple[str, ...], list[str]] = {}
    rules = []
    for problem in problems:
        location = tuple(str(part) for part in problem["loc"])
        path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in _LEAVES), location)
        if problem["type"] == "value_error" and path not in _LEAVES:
            rules.append(problem["msg"].removeprefix("Value error, "))  # a rule across options names them itself
        elif problem["type"] == "extra_forbidden" and path not in _LEAVES:
            known = {".".join(leaf[:n]): leaf for leaf in _LEAVES for n in range(1, len(leaf) + 1)}
            name = ".".join(location)
            rules.append(f"unknown key {name}{_suggest(name, known, prefix='')}")
        else:
            messages_by_option.setdefault(path, []).append(_explain(problem, ".".join(location[len(path) :])))
    return rules + [
        f"--{option_name(path)}: got {_value_at(tree, path)!r}; {_join(messages)}"
        for path, messages in messages_by_option.items()
    ]


def _explain(problem: Any, inside: str) -> str:
    """Return one error in a few words; `inside` is its place in a list or mapping."""
    if problem["type"] == "missing":
        return f"missing key {inside}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {inside}"
    message: str = problem["msg"].removeprefix("Value error, ")
    if message.startswith("Input should be "):
        return _ALLOWED + message.removeprefix("Input should be ").partition(", unable to")[0]
    return message[:1].lower() + message[1:]


def _join(messages: Sequence[str]) -> str:
    """Join the errors of one option, without pydantic's complaint that a list with wrong items is too short."""
    different = list(dict.fromkeys(messages))
    kept = [m for m in different if "after validation, not" not in m] or different
    allowed = " or ".join(m.removeprefix(_ALLOWED) for m in kept if m.startswith(_ALLOWED))
    return "; ".join([m for m in kept if not m.startswith(_ALLOWED)] + ([_ALLOWED + allowed] if allowed else []))


def _value_at(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value that the tree has for an option, None if it has none."""
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
