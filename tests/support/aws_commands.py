"""Runs printed `aws` commands with boto3, which shares its description of every operation with the AWS CLI."""

from __future__ import annotations

import shlex
from typing import Any

import boto3
from botocore import xform_name

#: Options of the CLI that no operation has.
_GLOBAL = {"region"}


def run(line: str) -> None:
    """Run every command of a line joined with `&&`; fail for an unknown service, operation or option."""
    for command in line.split(" && "):
        words = shlex.split(command)
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
            continue
        assert words[0] == "aws", command
        if words[1:3] == ["s3", "rb"]:
            boto3.client("s3").delete_bucket(Bucket=words[3].removeprefix("s3://"))
        elif words[2] == "wait":
            client = boto3.client(words[1])
            waiter = client.get_waiter(words[3].replace("-", "_"))
            _options(client, _waited_operation(client, words[3]), words[4:])
            assert waiter.name
        else:
            client = boto3.client(words[1])
            getattr(client, words[2].replace("-", "_"))(**_options(client, words[2], words[3:]))


def _waited_operation(client: Any, waiter: str) -> str:
    """Return the operation that a waiter repeats."""
    name = "".join(part.capitalize() for part in waiter.split("-"))
    operation = client._get_waiter_config()["waiters"][name]["operation"]
    return xform_name(operation, "-")


def _options(client: Any, operation: str, words: list[str]) -> dict[str, Any]:
    """Return the arguments of an operation from the CLI's options; a boolean option has no value."""
    names = {xform_name(name): name for name in client.meta.method_to_api_mapping}
    api = client.meta.method_to_api_mapping[operation.replace("-", "_")]
    shape = client.meta.service_model.operation_model(api).input_shape
    members = {xform_name(name, "-"): (name, member.type_name) for name, member in shape.members.items()}
    assert names, "a client without operations"
    found: dict[str, Any] = {}
    while words:
        option = words.pop(0)
        assert option.startswith("--"), f"{operation}: not an option: {option}"
        option = option.removeprefix("--")
        if option in _GLOBAL:
            words.pop(0)
            continue
        assert option in members, f"aws {operation} has no option --{option}; it has {sorted(members)}"
        name, kind = members[option]
        if kind == "boolean":
            found[name] = True
        else:
            value = words.pop(0)
            found[name] = [value] if kind == "list" else int(value) if kind == "integer" else value
    return found
