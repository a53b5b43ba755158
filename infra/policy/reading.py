"""Resources as rules see them: plain values, and one that stands for what is not known yet."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

Props = dict[str, Any]
Config = Mapping[str, Any]


class _Unknown(dict[str, Any]):
    """Is there, is not empty, and whatever is asked of it is not known either."""

    def __bool__(self) -> bool:
        return True

    def get(self, *_: object) -> Any:
        """The same."""
        return self


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Resource:
    """A resource's type, name and properties. What a preview cannot know is `UNKNOWN`, and is checked by `up`."""

    type: str
    name: str
    props: Props
    urn: str = ""
    provider: Props = field(default_factory=dict)
    needs: Sequence[str] = ()


Check = Callable[[Resource, Config], Iterable[str]]
StackCheck = Callable[[Sequence[Resource], Config], Iterable[tuple[str, str | None]]]


def resource_rule(
    name: str, description: str, check: Check, options: Mapping[str, Mapping[str, Any]] | None = None
) -> ResourceValidationPolicy:
    """A mandatory rule about single resources; `options` are its configuration as JSON schema, each with a default."""

    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        provider = plain(args.provider.props) if args.provider else {}
        resource = Resource(args.resource_type, args.name, plain(args.props), args.urn, provider)
        for text in check(resource, _configured(options, args.get_config())):
            report(text, None)

    return ResourceValidationPolicy(
        name=name,
        description=description,
        validate=validate,
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=_schema(options),
    )


def stack_rule(
    name: str, description: str, check: StackCheck, options: Mapping[str, Mapping[str, Any]] | None = None
) -> StackValidationPolicy:
    """A mandatory rule about a stack as a whole; `check` gives texts and the URN that each is about."""

    def validate(args: StackValidationArgs, report: ReportViolation) -> None:
        resources = [_of_stack(item) for item in args.resources]
        for text, urn in check(resources, _configured(options, args.get_config())):
            report(text, urn)

    return StackValidationPolicy(
        name=name,
        description=description,
        validate=validate,
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=_schema(options),
    )


def strings(description: str, default: Sequence[str]) -> dict[str, Any]:
    """Schema of an option that is a list of texts."""
    return {"type": "array", "items": {"type": "string"}, "default": list(default), "description": description}


def is_shell(resource: Resource) -> bool:
    """Whether it is a component of a provider, which shows the engine nothing of itself: its children are checked."""
    return resource.type.startswith("eks:") and not resource.props


def matches(text: str, patterns: Iterable[str]) -> bool:
    """Whether a text fits one of the shell patterns."""
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


def plain(value: Any) -> Any:
    """Dictionaries, lists and scalars instead of the proxies of the policy SDK, which raise at what is not known."""
    if isinstance(value, Mapping):
        return {key: _at(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_at(value, index) for index in range(len(value))]
    return value


def listed(value: Any) -> list[Any]:
    """A list, of one where it was a single value, empty where there is none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def dicts(value: Any) -> list[Props]:
    """The dictionaries of a list, or the one dictionary; those that are known."""
    return [item for item in listed(value) if isinstance(item, dict) and item is not UNKNOWN]


def _at(container: Any, key: Any) -> Any:
    try:
        return plain(container[key])
    except UnknownValueError:
        return UNKNOWN


def _of_stack(item: PolicyResource) -> Resource:
    provider = plain(item.provider.props) if item.provider else {}
    needs = [other.urn for other in item.dependencies]
    return Resource(item.resource_type, item.name, plain(item.props), item.urn, provider, needs)


def _schema(options: Mapping[str, Mapping[str, Any]] | None) -> PolicyConfigSchema | None:
    return PolicyConfigSchema({name: dict(schema) for name, schema in options.items()}) if options else None


def _configured(options: Mapping[str, Mapping[str, Any]] | None, given: Config) -> Config:
    """The options with their defaults; what was given wins."""
    return {name: schema["default"] for name, schema in (options or {}).items()} | dict(given)
