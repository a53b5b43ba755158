"""What a stack can configure in common, and the one function that turns a stack's configuration into checked settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Literal, TypeVar

import pulumi
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from infra import checks, clouds, cost
from infra.problems import Problem, SettingsError, first_of_each, unset
from infra.validation import problems_of

Launcher = Literal["job", "pytorchjob", "trainjob", "torchx"]


def _cidr(value: str) -> str:
    return str(IPv4Network(value))


Cidr = Annotated[str, AfterValidator(_cidr), Field(examples=["10.0.0.0/16"])]
#: Legal as a tag or label on every cloud: the strictest of them allows these characters, 63 at most.
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$", examples=["ml-platform"])]


class Section(BaseModel):
    """A group of keys: immutable, and a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Nodes(Section):
    """How many GPU nodes: the autoscaler's bounds and the number to start with."""

    min: int = Field(0, ge=0, le=1000)
    desired: int = Field(2, ge=0, le=1000)
    max: int = Field(2, ge=0, le=1000)


class GpuSettings(Section):
    """The GPU pool of any cluster."""

    nodes: Nodes = Nodes()

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from checks.node_counts(self.nodes.min, self.nodes.desired, self.nodes.max)


class ManagedGpuSettings(GpuSettings):
    """The GPU pool of a cluster that this project creates.

    A cloud narrows `capacity` with a Literal of its own and names in `reserved` those that need `reservation_id`.
    """

    reserved: ClassVar[frozenset[str]] = frozenset({"reservation"})

    instance_type: str = Field(examples=["<type>"])
    capacity: str = "on_demand"
    reservation_id: str | None = None

    def problems(self) -> Iterable[Problem]:
        """Mistakes across this section's keys."""
        yield from super().problems()
        yield from checks.reservation(self.capacity, self.reservation_id, self.reserved)


class StorageSettings(Section):
    """Shared storage for datasets, and what `pulumi destroy` does with the checkpoints."""

    size_gib: int = Field(1200, gt=0)
    mount_path: str = Field("/data", pattern=r"^/[a-zA-Z0-9/_.-]+$", examples=["/data"])
    on_destroy: Literal["keep", "delete"] = "keep"


class ManagedStorageSettings(StorageSettings):
    """Storage that this project creates, the checkpoint bucket included."""

    expire_checkpoints_after_days: int | None = Field(None, gt=0)


class NetworkSettings(Section):
    """The private network and who may reach the Kubernetes API; nothing is public unless ranges are given."""

    cidr: Cidr = "10.0.0.0/16"
    authorized_cidrs: tuple[Cidr, ...] = ()


class Tags(Section):
    """What every resource is tagged or labelled with, beside project and stack."""

    owner: Label
    cost_centre: Label
    extra: dict[str, Label] = {}


class Budget(Section):
    """A ceiling that stops `pulumi preview`; counted at `gpu.nodes.max`, since an autoscaler may go there."""

    max_usd_per_hour: float | None = Field(None, gt=0)


class AddonSettings(Section):
    """Operators beyond those that the launcher and the hardware need."""

    monitoring: bool = True
    kueue: bool = False


class JobSettings(Section):
    """The part of `job` that decides which operator is installed."""

    launcher: Launcher = "pytorchjob"


class StackSettings(Section):
    """Everything a stack configures about its cluster; a cloud's `Settings` adds its own keys.

    `provider_keys` maps a field to the configuration key of the cloud's provider that holds it.
    """

    provider_keys: ClassVar[Mapping[str, str]] = {}

    project: str
    stack: str
    cloud: str
    namespace: str = Field("training", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", examples=["training"])
    gpu: GpuSettings = GpuSettings()
    storage: StorageSettings = StorageSettings()
    tags: Tags
    budget: Budget = Budget()
    addons: AddonSettings = AddonSettings()

    @property
    def labels(self) -> dict[str, str]:
        """Tags of every resource, in the spelling that all clouds allow."""
        common = {"project": self.project, "stack": self.stack, "managed-by": "pulumi"}
        return common | {"owner": self.tags.owner, "cost-centre": self.tags.cost_centre} | self.tags.extra

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections; a cloud extends it with `yield from super().problems()` first."""
        yield from self.gpu.problems()

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[cost.CostLine]:
        """What an hour costs with so many GPU nodes; a cloud adds its control plane, system nodes and storage."""
        del num_gpu_nodes
        return ()

    @property
    def interruptible(self) -> bool:
        """Whether the pool's nodes may be taken away at any time, at the spot price."""
        return False


class ManagedStackSettings(StackSettings):
    """Settings of a stack whose cluster this project creates."""

    gpu: ManagedGpuSettings
    network: NetworkSettings = NetworkSettings()
    storage: ManagedStorageSettings = ManagedStorageSettings()

    def problems(self) -> Iterable[Problem]:
        """Mistakes across sections."""
        yield from super().problems()
        yield from checks.instance_of_cloud(self.cloud, self.gpu.instance_type)

    def cost_lines(self, num_gpu_nodes: int) -> Sequence[cost.CostLine]:
        """The GPU nodes; a cloud adds the rest."""
        return (cost.gpu_nodes(self.cloud, self.gpu.instance_type, num_gpu_nodes),)

    @property
    def interruptible(self) -> bool:
        """Whether the pool's nodes may be taken away at any time, at the spot price."""
        return self.gpu.capacity == "spot"


SectionT = TypeVar("SectionT", bound=BaseModel)
SettingsT = TypeVar("SettingsT", bound=StackSettings)


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


def load(sections: Mapping[str, type[BaseModel]] | None = None, further: Sequence[Check] = ()) -> Stack:
    """The running program's stack; every problem ends the program in one message without a stack trace.

    `sections` are top-level keys that other parts of the project own, with their models; `further` are their checks.
    """
    config = {**pulumi.runtime.get_config_env(), **pulumi.runtime.config.CONFIG.get()}
    try:
        return parse(config, pulumi.get_project(), pulumi.get_stack(), sections or {}, further)
    except SettingsError as error:
        raise pulumi.RunError(str(error)) from None


def parse(
    config: Mapping[str, str],
    project: str,
    stack: str,
    sections: Mapping[str, type[BaseModel]],
    further: Sequence[Check] = (),
) -> Stack:
    """Check one stack's raw configuration (`namespace:key` -> text); SettingsError names every problem."""
    raw, problems = _decode(config, project)
    cloud_problems = checks.one_of("cloud", str(raw.get("cloud", "")), clouds.available())
    if cloud_problems:
        raise SettingsError(stack, [*problems, *cloud_problems])
    cloud = clouds.load(str(raw["cloud"]))
    own = {key: raw.pop(key) for key in list(raw) if key in sections}
    parsed_sections: dict[str, BaseModel] = {}
    for name, model in sections.items():
        section, found = _tolerant(model, own.get(name, {}), (name,))
        parsed_sections[name] = section
        problems += found
    settings, found = _settings(cloud, raw, config, project, stack, sections)
    problems += found
    result = Stack(cloud, settings, parsed_sections)
    problems += [*settings.problems(), *cost.over_budget(settings)]
    for check in further:
        problems += check(result)
    if problems:
        raise SettingsError(stack, first_of_each(problems))
    return result


def _decode(config: Mapping[str, str], project: str) -> tuple[dict[str, object], list[Problem]]:
    """This project's keys, structured values decoded from the JSON in which the engine hands them over."""
    raw: dict[str, object] = {}
    problems = []
    for full_key, text in config.items():
        namespace, _, key = full_key.partition(":")
        if namespace != project:
            continue
        raw[key] = text
        if text[:1] in "{[" and text:
            try:
                raw[key] = json.loads(text)
            except json.JSONDecodeError as error:
                del raw[key]
                problems.append(Problem(key, f"not JSON ({error})", "a structured value", unset(key), text))
    return raw, problems


def _settings(
    cloud: clouds.Cloud,
    raw: Mapping[str, object],
    config: Mapping[str, str],
    project: str,
    stack: str,
    sections: Mapping[str, type[BaseModel]],
) -> tuple[StackSettings, list[Problem]]:
    """The cloud's settings from raw keys, its provider's keys filled in."""
    model = cloud.settings
    reserved = {"project", "stack", *model.provider_keys}
    problems = [_misplaced(key, model.provider_keys, raw[key]) for key in sorted(reserved & set(raw))]
    data = {key: value for key, value in raw.items() if key not in reserved}
    data |= {"project": project, "stack": stack}
    data |= {field: config[key] for field, key in model.provider_keys.items() if key in config}
    names = {(field,): key for field, key in model.provider_keys.items()}
    settings, found = _tolerant(model, data, (), names, tuple(sections))
    return settings, problems + found


def _misplaced(key: str, provider_keys: Mapping[str, str], seen: object) -> Problem:
    place = provider_keys.get(key)
    legal = f"{place}" if place else "set by Pulumi itself"
    return Problem(key, "not a key of this project", legal, unset(key), seen)


def _tolerant(
    model: type[SectionT],
    data: object,
    prefix: tuple[str, ...],
    names: Mapping[tuple[str, ...], str] | None = None,
    siblings: Sequence[str] = (),
) -> tuple[SectionT, list[Problem]]:
    """Parse `data`; keys in error are told, then dropped or replaced by an example, so that later checks still run."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        problems = problems_of(error, model, prefix, names or {}, siblings)
        repaired = data if isinstance(data, dict) else {}
        for item in error.errors():
            repaired = _without(repaired, item["loc"], model)
        return model.model_validate(repaired), problems


def _without(data: dict[str, object], path: tuple[int | str, ...], model: type[BaseModel]) -> dict[str, object]:
    """A copy of `data` whose value at `path` is gone, or is the field's example where it has no default."""
    head, rest = str(path[0]), path[1:]
    copy = dict(data)
    info = model.model_fields.get(head)
    nested = info.annotation if info else None
    is_section = isinstance(nested, type) and issubclass(nested, BaseModel)
    value = copy.pop(head, None)
    if is_section and (rest or info is not None and info.is_required()):
        assert isinstance(nested, type)
        inner = value if isinstance(value, dict) else {}
        copy[head] = _without(inner, rest, nested) if rest else _examples(nested)
    elif info is not None and info.is_required():
        copy[head] = _example(info.examples)
    return copy


def _examples(model: type[BaseModel]) -> dict[str, object]:
    """Stand-ins for a section that is missing altogether."""
    return {name: _example(info.examples) for name, info in model.model_fields.items() if info.is_required()}


def _example(examples: list[object] | None) -> object:
    assert examples, "a required key needs an example: it stands in for a missing value and shows the user a legal one"
    return examples[0]

