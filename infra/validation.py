"""Pydantic's errors told as problems: the key as a person types it, the value seen, what is legal, the mend."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from infra.problems import Problem, mend, unset

Path = tuple[int | str, ...]

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "dict": "keys and values"}


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    prefix: tuple[str, ...],
    names: Mapping[tuple[str, ...], str],
    siblings: Sequence[str] = (),
) -> list[Problem]:
    """One problem for each of pydantic's errors.

    `prefix` is where `model` sits, `names` the configuration keys of fields that a provider holds, `siblings` further
    legal top-level keys.
    """
    return [_problem(item, model, prefix, names, siblings) for item in error.errors()]


def _problem(
    item: ErrorDetails,
    model: type[BaseModel],
    prefix: tuple[str, ...],
    names: Mapping[tuple[str, ...], str],
    siblings: Sequence[str],
) -> Problem:
    path: Path = (*prefix, *item["loc"])
    key = names.get(tuple(str(part) for part in path), _dotted(path))
    parent, info = _resolve(model, item["loc"])
    examples = info.examples if info else None
    example = examples[0] if examples else "<value>"
    if item["type"] == "extra_forbidden":
        legal = sorted(name for name in (*parent.model_fields, *siblings) if name not in ("project", "stack"))
        legal = [names.get((name,), name) for name in legal] if not prefix and parent is model else legal
        close = difflib.get_close_matches(str(path[-1]), legal, n=1)
        hint = f"unknown key, did you mean {close[0]!r}?" if close else "unknown key"
        return Problem(key, hint, ", ".join(legal), unset(key), item["input"])
    if item["type"] == "missing":
        if info and isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            name, first = next((name, field) for name, field in info.annotation.model_fields.items() if field.is_required())
            return Problem(f"{key}.{name}", "missing", "required", mend(f"{key}.{name}", _first(first.examples)))
        return Problem(key, "missing", f"for example {example}" if examples else "required", mend(key, example))
    legal_text, value = _legal(item, example)
    return Problem(key, item["msg"].removeprefix("Value error, ").lower(), legal_text, mend(key, value), item["input"])


def _legal(item: ErrorDetails, example: object) -> tuple[str, object]:
    """What is legal in words, and one legal value."""
    context = item.get("ctx", {})
    if "expected" in context:
        words = str(context["expected"])
        return words, words.split(",")[0].split(" or ")[0].strip("'")
    for bound, words in _BOUNDS.items():
        if bound in context:
            limit = context[bound]
            step = {"gt": 1, "lt": -1}.get(bound, 0)
            return f"{words} {limit}", limit + step if isinstance(limit, int | float) else example
    if "pattern" in context:
        return f"text matching {context['pattern']}", example
    kind = item["type"].split("_")[0]
    return _KINDS.get(kind, f"for example {example}"), example


def _resolve(model: type[BaseModel], path: Path) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that owns the last key of `path`, and that key's field."""
    owner, info = model, None
    for part in path:
        info = owner.model_fields.get(str(part))
        if info and isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel) and part is not path[-1]:
            owner = info.annotation
    return owner, info


def _first(examples: list[object] | None) -> object:
    return examples[0] if examples else "<value>"


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
