"""The checked configuration of a stack, with all problems reported at once before any resource is registered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from infra import clouds
from infra.config import checks
from infra.config.problems import Problem, SettingsError, fix_by_removing, keep_first_per_key
from infra.config.settings import StackSettings
from infra.config.validation import Path, validate_leniently

SectionT = TypeVar("SectionT", bound=BaseModel)


@dataclass(frozen=True)
class Stack:
    """One stack's checked configuration: its cloud, its settings and the sections of other packages."""

    cloud: clouds.Cloud
    settings: StackSettings
    sections: Mapping[str, BaseModel]

    def section(self, name: str, model: type[SectionT]) -> SectionT:
        """Return the section `name`, which was declared with `model`."""
        found = self.sections[name]
        assert isinstance(found, model), f"section {name} is a {type(found).__name__}"
        return found


Check = Callable[[Stack], Iterable[Problem]]
Sections = Mapping[str, type[BaseModel]]


def load(sections: Sections, further: Sequence[Check] = ()) -> Stack:
    """Return the stack of the running Pulumi program; raise RunError, shown without a stack trace, for any problem.

    `sections` maps the top-level keys of other packages to their models, `further` are the checks of these packages.
    """
    import pulumi  # lazy: `python -m workloads plan` reads stacks without it

    # pulumi.Config reads single keys that the caller knows; rejecting unknown keys requires all of them.
    config = {**pulumi.runtime.get_config_env(), **pulumi.runtime.config.CONFIG.get()}
    try:
        return parse(config, pulumi.get_project(), pulumi.get_stack(), sections, [find_access_problems, *further])
    except SettingsError as error:
        raise pulumi.RunError(str(error)) from None


def parse(
    config: Mapping[str, str], project: str, stack: str, sections: Sections, further: Sequence[Check] = ()
) -> Stack:
    """Check a raw configuration (`namespace:key` to text); raise SettingsError with all problems."""
    result, problems = _read(config, project, stack, sections)
    settings = result.settings
    problems += settings.problems()
    lines_at_max = settings.cost_lines(settings.gpu.nodes.max)
    problems += checks.budget(settings.budget.max_usd_per_hour, lines_at_max, settings.interruptible)
    for check in further:
        problems += check(result)
    if problems:
        raise SettingsError(stack, keep_first_per_key(problems))
    return result


def find_access_problems(configured: Stack) -> Iterable[Problem]:
    """Return the mistake for which `up` would not reach the cluster that it creates; `cost` and `plan` need no way."""
    return configured.settings.access_problems()


def parse_leniently(config: Mapping[str, str], project: str, stack: str, sections: Sections) -> Stack:
    """Parse a raw configuration with examples instead of invalid values; raise SettingsError for an unknown cloud."""
    return _read(config, project, stack, sections)[0]


def _read(config: Mapping[str, str], project: str, stack: str, sections: Sections) -> tuple[Stack, list[Problem]]:
    """Parse each section with its model; return the problems of single keys too."""
    raw, problems = decode(config, project)
    name = str(raw.get("cloud", ""))
    unknown = checks.one_of("cloud", name, clouds.available())
    if unknown:
        raise SettingsError(stack, [*problems, *unknown])
    cloud = clouds.load(name)
    service = _find_service(cloud.settings, raw)
    parsed: dict[str, BaseModel] = {}
    for key, model in sections.items():
        parsed[key], found = validate_leniently(model, raw.pop(key, {}), (key,))
        problems += found
    derived = {"project": project, "stack": stack} | service
    settings, found = _read_settings(cloud, raw, config, derived, tuple(sections))
    return Stack(cloud, settings, parsed), [*problems, *found]


def decode(config: Mapping[str, str], project: str) -> tuple[dict[str, object], list[Problem]]:
    """Return this project's keys, with structured values decoded from the engine's JSON."""
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


def _find_service(settings: type[StackSettings], raw: Mapping[str, object]) -> dict[str, str]:
    """Return the field `service` if the job's launcher is a training service of the cloud."""
    job = raw.get("job")
    launcher = job.get("launcher") if isinstance(job, dict) else None
    return {"service": launcher} if launcher in settings.services else {}


def _read_settings(
    cloud: clouds.Cloud,
    raw: Mapping[str, object],
    config: Mapping[str, str],
    derived: Mapping[str, str],
    siblings: Sequence[str],
) -> tuple[StackSettings, list[Problem]]:
    """Validate the cloud's settings: this project's keys, its provider's keys and the `derived` fields."""
    provider = cloud.settings.provider_keys
    reserved = {"project": "the project's name, from Pulumi.yaml", "stack": "the stack's name", **provider}
    reserved["service"] = "set by job.launcher"
    problems = [
        Problem(key, "not a key of this project", reserved[key], fix_by_removing(key), raw[key])
        for key in reserved
        if key in raw
    ]
    data = {key: value for key, value in raw.items() if key not in reserved}
    data |= derived
    data |= {field: config[key] for field, key in provider.items() if key in config}
    names: dict[Path, str] = {(field,): key for field, key in provider.items()}
    settings, found = validate_leniently(cloud.settings, data, (), names, siblings)
    return settings, problems + found
