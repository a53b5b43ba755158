"""Translation of pydantic's errors into problems: the key as the user types it, allowed values and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from infra.config.problems import Problem, fix_by_removing, fix_by_setting

Path = tuple[int | str, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_SECTION_TYPES = ("model_type", "model_attributes_type", "dict_type")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "date": "a date, for example 2026-12-01",
    "dict": "a section with keys",
    "model": "a section with keys",
}
#: Set by the program, never by the user.
_DERIVED = ("project", "stack")


def validate_leniently(
    model: type[ModelT],
    data: object,
    prefix: tuple[str, ...] = (),
    names: Mapping[Path, str] | None = None,
    siblings: Sequence[str] = (),
) -> tuple[ModelT, list[Problem]]:
    """Parse `data` and return its problems; invalid keys are dropped or get an example, so that later checks can run.

    `prefix` is the path of `model`, `names` maps fields to the provider's keys that set them, `siblings` are further
    allowed top-level keys.
    """
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        translator = _Translator(model, prefix, names or {}, siblings)
        repaired = dict(data) if isinstance(data, dict) else {}
        for item in error.errors():
            repaired = _without(repaired, item["loc"], model)
        problems = [problem for item in error.errors() for problem in translator.translate(item)]
        return model.model_validate(_examples(model) | repaired), problems


def _section(info: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of a field that is a section, also of an optional one; None for any other field."""
    found = info.annotation if info else None
    choices = get_args(found) if get_origin(found) in (Union, UnionType) else (found,)
    return next((one for one in choices if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _without(data: dict[str, object], path: Path, model: type[BaseModel]) -> dict[str, object]:
    """Return a copy of `data` without the value at `path`; a field without default gets its example."""
    if not path:
        return {}
    head, rest = str(path[0]), path[1:]
    info = model.model_fields.get(head)
    section = _section(info)
    copy = dict(data)
    value = copy.pop(head, None)
    if section is not None and rest:
        copy[head] = _without(value if isinstance(value, dict) else {}, rest, section)
    elif section is not None:
        copy[head] = _examples(section)
    elif info is not None and info.is_required():
        copy[head] = _example(info)
    return copy


def _examples(model: type[BaseModel]) -> dict[str, object]:
    """Return examples for the keys of a section that have no default."""
    required = {name: info for name, info in model.model_fields.items() if info.is_required() and name not in _DERIVED}
    return {name: _examples(inner) if (inner := _section(info)) else _example(info) for name, info in required.items()}


def _example(info: FieldInfo) -> object:
    """Return an allowed value, to show or to use instead of a missing one."""
    if info.examples:
        return info.examples[0]
    return "<value>" if info.is_required() or info.default is None else info.default


@dataclass(frozen=True)
class _Translator:
    """Translates pydantic's errors into problems."""

    model: type[BaseModel]
    prefix: tuple[str, ...]
    names: Mapping[Path, str]
    siblings: Sequence[str]

    def translate(self, item: ErrorDetails) -> list[Problem]:
        """Return the problems of one error; a missing section has one problem per required key."""
        path: Path = (*self.prefix, *item["loc"])
        key = self.names.get(path) or _dotted(path)
        if item["type"] == "extra_forbidden":
            return [self._unknown(key, item)]
        info = _field(self.model, item["loc"])
        if item["type"] == "missing":
            return _missing(key, info)
        if item["type"] == "tuple_type":
            return [_not_a_list(key, info, item["input"])]
        section = _section(info) or (self.model if not item["loc"] else None)
        if section and item["type"] in _SECTION_TYPES:
            return [_not_a_section(key, section, item["input"])]
        if item["input"] is None and path and isinstance(path[-1], int):
            # Of several gaps only one is reported at a time: every removal moves the entries after it.
            names, fix = _dotted(path[:-1]), fix_by_removing(key)
            return [Problem(names, f"no entry [{path[-1]}], and a list has no gaps", "a list without gaps", fix)]
        message = item["msg"].removeprefix("Value error, ")
        if _section(info) and item["type"] == "value_error":
            # Keys of the section contradict each other: the user decides which of them to change.
            return [Problem(key, message, "keys that agree", fix_by_setting(f"{key}.<key>", "<value>"), item["input"])]
        example = _example(info) if info else "<value>"
        allowed, value = _allowed(item, example, info)
        return [Problem(key, _describe(item), allowed, fix_by_setting(key, value), item["input"])]

    def _unknown(self, key: str, item: ErrorDetails) -> Problem:
        """Return the problem of an unknown key, with the keys that its section allows."""
        *parents, last = item["loc"]
        owner: type[BaseModel] = self.model
        for depth in range(1, len(parents) + 1):
            owner = _section(_field(self.model, item["loc"][:depth])) or owner
        new_key = getattr(owner, "renamed", {}).get(str(last))
        if new_key:
            scalar = isinstance(item["input"], str | int | float)
            fix = f"{fix_by_setting(new_key, item['input'] if scalar else '<value>')}; {fix_by_removing(key)}"
            return Problem(key, f"renamed to {new_key}", f"the key {new_key}", fix, item["input"])
        top = not parents and not self.prefix
        own = [self.names.get((name,), name) for name in owner.model_fields if not (top and name in _DERIVED)]
        allowed = sorted([*own, *(self.siblings if top else ())])
        close = difflib.get_close_matches(str(last), allowed, n=1)
        hint = f"unknown key, did you mean {close[0]!r}?" if close else "unknown key"
        return Problem(key, hint, ", ".join(allowed), fix_by_removing(key), item["input"])


def _field(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """Return the innermost declared field along `path`."""
    owner: type[BaseModel] | None = model
    info: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            owner, info = _section_of_items(info), _entry(info)
            continue
        found = owner.model_fields.get(part) if owner else _entry(info)
        if found is None:
            break
        info, owner = found, _section(found)
    return info


def _entry(info: FieldInfo | None) -> FieldInfo | None:
    """Return the field of one entry of a list or of named entries; a list's own example is one of an entry."""
    arguments = get_args(info.annotation) if info else ()
    origin = get_origin(info.annotation) if info else None
    if info is None or origin not in (tuple, dict):
        return info
    entry = FieldInfo.from_annotation(arguments[0] if origin is tuple else arguments[1])
    if origin is tuple and info.examples:
        entry.examples = info.examples
    return entry


def _section_of_items(info: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of the items of a field that is a list of sections, None for any other field."""
    item = next(iter(get_args(info.annotation)), None) if info else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def _missing(key: str, info: FieldInfo | None) -> list[Problem]:
    """Return the problem of a missing key, or one per required key of a missing section."""
    section = _section(info)
    if section is not None:
        inner = section.model_fields.items()
        return [found for name, field in inner if field.is_required() for found in _missing(f"{key}.{name}", field)]
    example = _example(info) if info else "<value>"
    return [Problem(key, "missing", f"for example {_spell(example)}", fix_by_setting(key, example))]


def _spell(value: object) -> str:
    """Return a value in words, without the punctuation of Python."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {inner}" for name, inner in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_a_list(key: str, info: FieldInfo | None, value: object) -> Problem:
    """Return the problem of a single value instead of a list, with that value as the list's first entry."""
    entry = _entry(info)
    first = value if isinstance(value, str | int | float) and value else _example(entry) if entry else "<value>"
    fix = fix_by_removing(key)
    if _section_of_items(info) is None:
        fix += f"; {fix_by_setting(f'{key}[0]', first)}"
    return Problem(key, "not a list", f"a list: {key}[0], {key}[1] ...", fix, value)


def _not_a_section(key: str, section: type[BaseModel], value: object) -> Problem:
    """Return the problem of a single value instead of a section; a number is proposed for its last numeric key."""
    leaves = {name: info for name, info in section.model_fields.items() if _section(info) is None}
    numbers = [name for name, info in leaves.items() if info.annotation is int]
    is_number = isinstance(value, int | float | str) and str(value).isdigit()
    keys = ", ".join(f"{key}.{name}" for name in section.model_fields if name not in _DERIVED)
    fix = fix_by_removing(key)
    if is_number and numbers:
        fix += f"; {fix_by_setting(f'{key}.{numbers[-1]}', value)}"
    return Problem(key, f"not {_KINDS['model']}", keys, fix, value)


def _describe(item: ErrorDetails) -> str:
    """Return what is wrong with a value in plain words."""
    context, kind = item.get("ctx", {}), item["type"].split("_")[0]
    if "expected" in context:
        return "unknown value"
    if context.keys() & {"ge", "gt"}:
        return "too small"
    if context.keys() & {"le", "lt"}:
        return "too large"
    if "pattern" in context:
        return "not of this form"
    if kind in _KINDS:
        return f"not {_KINDS[kind].partition(',')[0]}"
    message = item["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _closest(value: object, options: Sequence[str], info: FieldInfo | None) -> str:
    """Return the allowed value that is closest to `value`, or else the default."""
    if isinstance(value, int | float | str) and re.fullmatch(r"\d+", str(value)) and all(map(str.isdigit, options)):
        return min(options, key=lambda option: abs(int(option) - int(value)))
    close = difflib.get_close_matches(str(value), options, n=1)
    default = str(info.default) if info else ""
    return close[0] if close else default if default in options else options[0]


def _allowed(item: ErrorDetails, example: object, info: FieldInfo | None) -> tuple[str, object]:
    """Return the allowed values in words, and one of them."""
    context = item.get("ctx", {})
    if "expected" in context:
        options = [option.strip("'") for option in re.split(r", | or ", str(context["expected"]))]
        return " | ".join(options), _closest(item["input"], options, info)
    for bound, words in _BOUNDS.items():
        if bound in context:
            limit = context[bound]
            step = {"gt": 1, "lt": -1}.get(bound, 0)
            return f"{words} {limit}", limit + step if isinstance(limit, int) else limit
    if "pattern" in context:
        shown = f"for example {_spell(example)}"
        return f"{info.description}, {shown}" if info and info.description else shown, example
    return _KINDS.get(item["type"].split("_")[0], f"for example {_spell(example)}"), example


def _dotted(path: Path) -> str:
    """Return a path as the user types it, such as `gpu.zones[0]` or `tags.extra["a.b"]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w:-]+", part):
            text += f".{part}" if text else part
        else:
            text += f'["{part}"]'
    return text
