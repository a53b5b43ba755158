"""How a rule is built from a function that checks plain values; only this module handles the policy SDK's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pulumi_policy import (
    EnforcementLevel,
    PolicyConfigSchema,
    PolicyResource,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UnknownValueError

from infra.policy_facts import UNKNOWN, Resource

Config = Mapping[str, Any]
Options = Mapping[str, Mapping[str, Any]]

ResourceCheck = Callable[[Resource, Config], Iterable[str]]
StackCheck = Callable[[Sequence[Resource], Config], Iterable[tuple[str, str | None]]]


def resource_rule(
    name: str, description: str, check: ResourceCheck, options: Options | None = None
) -> ResourceValidationPolicy:
    """Return a mandatory rule about single resources.

    `options` are the rule's configuration: a JSON schema with a default for each option.
    """

    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        provider = to_plain(args.provider.props) if args.provider else {}
        resource = Resource(args.resource_type, args.name, to_plain(args.props), args.urn, provider)
        for text in check(resource, _config(options, args.get_config())):
            report(text, None)

    return ResourceValidationPolicy(
        name=name,
        description=description,
        validate=validate,
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=_schema(options),
    )


def stack_rule(name: str, description: str, check: StackCheck, options: Options | None = None) -> StackValidationPolicy:
    """Return a mandatory rule about a whole stack; `check` yields each violation with the URN it is about."""

    def validate(args: StackValidationArgs, report: ReportViolation) -> None:
        resources = [_resource(item) for item in args.resources]
        for text, urn in check(resources, _config(options, args.get_config())):
            report(text, urn)

    return StackValidationPolicy(
        name=name,
        description=description,
        validate=validate,
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=_schema(options),
    )


def strings(description: str, default: Iterable[str]) -> dict[str, Any]:
    """Return the schema of an option that is a list of strings."""
    return {"type": "array", "items": {"type": "string"}, "default": list(default), "description": description}


def to_plain(value: Any) -> Any:
    """Return dictionaries, lists and scalars instead of the SDK's proxies, which raise on unknown values."""
    if isinstance(value, Mapping):
        return {key: _item(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_item(value, index) for index in range(len(value))]
    return value


def _item(container: Any, key: Any) -> Any:
    try:
        return to_plain(container[key])
    except UnknownValueError:
        return UNKNOWN


def _resource(item: PolicyResource) -> Resource:
    provider = to_plain(item.provider.props) if item.provider else {}
    needs = [other.urn for other in item.dependencies]
    return Resource(item.resource_type, item.name, to_plain(item.props), item.urn, provider, needs)


def _schema(options: Options | None) -> PolicyConfigSchema | None:
    return PolicyConfigSchema({name: dict(schema) for name, schema in options.items()}) if options else None


def _config(options: Options | None, given: Config) -> Config:
    """Return the options' defaults, overridden by what the user configured."""
    return {name: schema["default"] for name, schema in (options or {}).items()} | dict(given)
