"""Checks of a resource's inputs against its provider's SDK: required inputs and their types."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pulumi
from engine_values import UNKNOWN
from pulumi import _types as sdk_types

#: The table of a package's resources in its `__init__.py`.
_TABLE = re.compile(r'resource_modules="""\s*(\[.*?\])\s*"""', re.DOTALL)


def problems(token: str, inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `(path, reason)` for each input that the SDK's classes do not allow."""
    arguments = arguments_of(token)
    if arguments is not None:
        yield from _object("", arguments, inputs)


@cache
def arguments_of(token: str) -> type | None:
    """Return the class of a resource's arguments, or None if the SDK has none (custom resources)."""
    found = _table(token.partition(":")[0]).get(token)
    if found is None:
        return None
    module, name = found
    imported = importlib.import_module(module)
    # For Kubernetes the arguments of a resource are `<Kind>InitArgs`; `<Kind>Args` is an object nested in a list.
    return getattr(imported, f"{name}InitArgs", None) or getattr(imported, f"{name}Args", None)


@cache
def _table(package: str) -> dict[str, tuple[str, str]]:
    """Return module and class of every resource of a package, without importing the package."""
    module = f"pulumi_{package.replace('-', '_')}"
    spec = importlib.util.find_spec(module)
    assert spec, f"{module} is not installed"
    assert spec.origin, f"{module} has no __init__.py"
    found = _TABLE.search(Path(spec.origin).read_text())
    assert found, f"{module} has an unknown table of resources"
    return {token: (row["fqn"], name) for row in json.loads(found.group(1)) for token, name in row["classes"].items()}


@cache
def _properties(arguments: type) -> dict[str, tuple[Any, bool]]:
    """Return type and requiredness of each input of an arguments class, by its name on the wire."""
    names, kinds = sdk_types.input_type_py_to_pulumi_names(arguments), sdk_types.input_type_types(arguments)
    parameters = inspect.signature(arguments.__init__).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    return {wire: (kinds.get(wire, Any), name in required) for name, wire in names.items()}


def _object(path: str, arguments: type, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = _properties(arguments)
    for name in sorted(value.keys() - known.keys() - {"__defaults", "__internal"}):
        yield f"{path}{name}", "not a property of this resource"
    for name, (kind, required) in known.items():
        if value.get(name) is None:
            if required:
                yield f"{path}{name}", "missing required property"
        else:
            yield from _value(f"{path}{name}", kind, value[name])


def _value(path: str, kind: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Check a value against a type hint of the SDK; ignore hints without useful information."""
    if value == UNKNOWN or value is None:
        return
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        choices = [one for one in arguments if one is not type(None) and not _is_wrapper(one)]
        failures = [list(_value(path, one, value)) for one in choices]
        if choices and all(failures):
            yield from min(failures, key=len)
    elif origin in (Sequence, list, typing.Sequence):
        yield from _items(path, arguments, value)
    elif origin in (Mapping, dict, typing.Mapping):
        if not isinstance(value, dict):
            yield path, f"{value!r} is not a map"
    elif isinstance(kind, type):
        yield from _scalar(path, kind, value)


def _items(path: str, arguments: tuple[Any, ...], value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, list):
        yield path, f"{value!r} is not a list"
        return
    for index, item in enumerate(value):
        yield from _value(f"{path}[{index}]", arguments[0] if arguments else Any, item)


def _scalar(path: str, kind: type, value: Any) -> Iterator[tuple[str, str]]:
    if sdk_types.is_input_type(kind):
        if isinstance(value, dict):
            yield from _object(f"{path}.", kind, value)
        else:
            yield path, f"{value!r} is not a {kind.__name__}"
    elif kind is str and not isinstance(value, str):
        yield path, f"{value!r} is not a string"
    elif kind is bool and not isinstance(value, bool):
        yield path, f"{value!r} is not a boolean"
    elif kind in (int, float) and (isinstance(value, bool) or not isinstance(value, (int, float))):
        yield path, f"{value!r} is not a number"


def _is_wrapper(kind: Any) -> bool:
    """Return whether a hint is an Output, an awaitable or a typed dict; none of them appears on the wire."""
    origin = typing.get_origin(kind) or kind
    return origin is pulumi.Output or getattr(origin, "__name__", "") == "Awaitable" or typing.is_typeddict(origin)
