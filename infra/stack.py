"""From a stack's raw configuration to checked settings: every problem in one message, before any resource."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pulumi
from pydantic import BaseModel

from infra import clouds
from infra.config import checks
from infra.config.problems import Problem, SettingsError, fix_by_removing, keep_first_per_key
from infra.config.settings import StackSettings
from infra.config.validation import Path, tolerant

SectionT = TypeVar("SectionT", bound=BaseModel)


@dataclass(frozen=True)
class Stack:
    """One stack's checked configuration: its cloud, its settings, and the sections that other parts own."""

    cloud: clouds.Cloud
    settings: StackSettings
    sections: Mapping[str, BaseModel]

    def section(self, name: str, model: type[SectionT]) -> SectionT:
        """The section `name`, which was declared with `model`."""
        found = self.sections[name]
        assert isinstance(found, model), f"section {name} is a {type(found).__name__}"
        return found


Check = Callable[[Stack], Iterable[Problem]]
Sections = Mapping[str, type[BaseModel]]


def load(sections: Sections, further: Sequence[Check] = ()) -> Stack:
    """The running program's stack; problems end the program in one message without a stack trace.

    `sections` are top-level keys that other parts of the project own, with their models; `further` are their checks.
    """
    # pulumi.Config reads one known key at a time; refusing unknown keys needs them all.
    config = {**pulumi.runtime.get_config_env(), **pulumi.runtime.config.CONFIG.get()}
    try:
        return parse(config, pulumi.get_project(), pulumi.get_stack(), sections, further)
    except SettingsError as error:
        raise pulumi.RunError(str(error)) from None


def parse(
    config: Mapping[str, str], project: str, stack: str, sections: Sections, further: Sequence[Check] = ()
) -> Stack:
    """Check one stack's raw configuration (`namespace:key` -> text); SettingsError names every problem."""
    result, problems = _read(config, project, stack, sections)
    settings = result.settings
    problems += settings.problems()
    at_most = settings.cost_lines(settings.gpu.nodes.max)
    problems += checks.budget(settings.budget.max_usd_per_hour, at_most, settings.interruptible)
    for check in further:
        problems += check(result)
    if problems:
        raise SettingsError(stack, keep_first_per_key(problems))
    return result


def repaired(config: Mapping[str, str], project: str, stack: str, sections: Sections) -> Stack:
    """The same, with examples in place of what is wrong; only an unknown cloud is a SettingsError."""
    return _read(config, project, stack, sections)[0]


def _read(config: Mapping[str, str], project: str, stack: str, sections: Sections) -> tuple[Stack, list[Problem]]:
    """Each section parsed by its model, and the problems of single keys."""
    raw, problems = _decode(config, project)
    name = str(raw.get("cloud", ""))
    unknown = checks.one_of("cloud", name, clouds.available())
    if unknown:
        raise SettingsError(stack, [*problems, *unknown])
    cloud = clouds.load(name)
    service = _service(cloud.settings, raw)
    parsed: dict[str, BaseModel] = {}
    for key, model in sections.items():
        parsed[key], found = tolerant(model, raw.pop(key, {}), (key,))
        problems += found
    settings, found = _settings(cloud, raw, config, {"project": project, "stack": stack} | service, tuple(sections))
    return Stack(cloud, settings, parsed), [*problems, *found]


def _decode(config: Mapping[str, str], project: str) -> tuple[dict[str, object], list[Problem]]:
    """This project's keys, structured values decoded from the JSON in which the engine hands them over."""
    raw: dict[str, object] = {}
    problems = []
    for full_key, text in config.items():
        namespace, _, key = full_key.partition(":")
        if namespace != project:
            continue
        try:
            raw[key] = json.loads(text) if text.startswith(("{", "[")) else text
        except json.JSONDecodeError as error:
            problems.append(Problem(key, f"not JSON ({error})", "a structured value", fix_by_removing(key), text))
    return raw, problems


def _service(settings: type[StackSettings], raw: Mapping[str, object]) -> dict[str, str]:
    """The one key of the job that decides what is provisioned: a launcher that is a service of the cloud."""
    job = raw.get("job")
    launcher = job.get("launcher") if isinstance(job, dict) else None
    return {"service": launcher} if launcher in settings.services else {}


def _settings(
    cloud: clouds.Cloud,
    raw: Mapping[str, object],
    config: Mapping[str, str],
    known: Mapping[str, str],
    siblings: Sequence[str],
) -> tuple[StackSettings, list[Problem]]:
    """The cloud's settings from this project's keys and its provider's; what is `known` comes from elsewhere."""
    provider = cloud.settings.provider_keys
    reserved = {"project": "the project's name, from Pulumi.yaml", "stack": "the stack's name", **provider}
    reserved["service"] = "job.launcher says it"
    problems = [
        Problem(key, "not a key of this project", reserved[key], fix_by_removing(key), raw[key])
        for key in reserved
        if key in raw
    ]
    data = {key: value for key, value in raw.items() if key not in reserved}
    data |= known
    data |= {field: config[key] for field, key in provider.items() if key in config}
    names: dict[Path, str] = {(field,): key for field, key in provider.items()}
    settings, found = tolerant(cloud.settings, data, (), names, siblings)
    return settings, problems + found
