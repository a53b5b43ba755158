"""Property values on the wire: protobuf structs with secrets and unknowns, and the plain values inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf import json_format, struct_pb2

#: Markers from `pulumi.runtime.rpc`: the key of a wrapped value, the kind of wrapping, an unknown value.
SIGNATURE = "4dabf18193072939515e22adb298388d"
SECRET = "1b47061264138c4ac30d75fd1eb44270"
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"


def decode(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return the struct as Python values; secrets stay wrapped, whole numbers are ints."""
    return {key: _whole(value) for key, value in json_format.MessageToDict(struct).items()}


def encode(value: Mapping[str, Any]) -> struct_pb2.Struct:
    """Return a struct for the wire."""
    struct = struct_pb2.Struct()
    struct.update(dict(value))
    return struct


def plain(value: Any) -> Any:
    """Return the value with every secret unwrapped."""
    if isinstance(value, dict):
        if value.get(SIGNATURE) == SECRET:
            return plain(value["value"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def secret(value: Any) -> dict[str, Any]:
    """Return the value marked as secret."""
    return {SIGNATURE: SECRET, "value": value}


def leaves(value: Any) -> Iterator[Any]:
    """Yield every scalar inside a plain value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def has_unknown(value: Any) -> bool:
    """Return whether any part of the value is unknown before `up`."""
    return any(leaf == UNKNOWN for leaf in leaves(value))


def at(value: Any, path: str) -> Any:
    """Return the part of a plain value at a path such as `spec.template`, or None."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield the paths (`spec.rules[0].port`) at which two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}[{index}]")
    elif old != new:
        yield path


def unknown_unless_given(value: Any, given: Any) -> Any:
    """Return the outputs with every part that is not an input replaced by UNKNOWN."""
    if value == given:
        return value
    if isinstance(value, dict) and isinstance(given, dict):
        return {key: unknown_unless_given(item, given.get(key)) for key, item in value.items()}
    return UNKNOWN


def is_below(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a path equals one of these or is inside one of them."""
    return any(path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")) for prefix in prefixes)


def _whole(value: Any) -> Any:
    """Turn whole floats into ints: protobuf sends every number as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value
