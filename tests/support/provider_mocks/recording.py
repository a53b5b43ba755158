"""Run a Pulumi program without an engine: record every registration and return plausible mocked outputs.

`clouds/<cloud>.py` holds the computed outputs of one cloud in two tables. `OUTPUTS` maps a type token to a function
(name, inputs) -> outputs, `CALLS` the token of a function to a function (arguments) -> result.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import io
import json
import pkgutil
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pulumi
import pulumi.runtime
import yaml
from pulumi.runtime import mocks
from pulumi.runtime import settings as runtime_settings
from pulumi.runtime.stack import run_pulumi_func
from pulumi.runtime.sync_await import _sync_await

from infra import clouds, stack_files
from provider_mocks import clouds as cloud_mocks

ROOT = Path(__file__).resolve().parents[3]
PROJECT = "torchrec-cloud"

#: The SDKs of each cloud; a stack may load only these and `SHARED_SDKS`.
SDKS: dict[str, set[str]] = {
    "aws": {"pulumi_aws", "pulumi_eks"},
    "azure": {"pulumi_azure_native"},
    "gcp": {"pulumi_gcp"},
    "local": set(),
}
SHARED_SDKS = {"pulumi_kubernetes", "pulumi_docker_build"}

Outputs = Callable[[str, dict[str, Any]], dict[str, Any]]
Call = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Registration:
    """One resource as registered with the engine; parent, provider and dependencies are URNs."""

    type: str
    name: str
    urn: str
    parent: str
    inputs: Mapping[str, Any]
    provider: str
    dependencies: frozenset[str]
    retained: bool
    protected: bool
    custom: bool
    ignored: tuple[str, ...]
    deleted_first: bool
    deleted_with: str

    @property
    def parent_name(self) -> str:
        """The parent's logical name; empty for a child of the stack."""
        kind, _, name = self.parent.rpartition("::")
        return "" if kind.endswith("pulumi:pulumi:Stack") else name


@dataclass
class Recording:
    """Everything one program registered, called and exported."""

    registrations: list[Registration] = field(default_factory=list)
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    exports: dict[str, Any] = field(default_factory=dict)
    secret_exports: set[str] = field(default_factory=set)
    error: BaseException | None = None

    def of_type(self, token: str) -> list[Registration]:
        """Return the registrations of exactly this type."""
        return [item for item in self.registrations if item.type == token]

    def one(self, token: str, name: str | None = None) -> Registration:
        """Return the only registration of this type and name; fail with the list of all if there is not exactly one."""
        found = [item for item in self.of_type(token) if name is None or item.name == name]
        assert len(found) == 1, f"{len(found)} of {token} {name or ''}; all: {sorted(self.tree())}"
        return found[0]

    def tree(self) -> list[str]:
        """Return the golden list: `type name parent` of each registration, sorted."""
        return sorted(f"{item.type}  {item.name}  {item.parent_name or '-'}" for item in self.registrations)

    def needs(self, later: Registration, earlier: Registration) -> bool:
        """Return whether `later` depends on `earlier`, directly or indirectly."""
        by_urn = {item.urn: item for item in self.registrations}
        seen: set[str] = set()
        queue = self._edges(later)
        while queue:
            urn = queue.pop()
            if urn in by_urn and urn not in seen:
                seen.add(urn)
                queue += self._edges(by_urn[urn])
        return earlier.urn in seen

    def _edges(self, item: Registration) -> list[str]:
        """Return what the engine creates before `item`: dependencies, parent, children of required components."""
        components = {one.urn for one in self.registrations if not one.custom} & item.dependencies
        children = [child.urn for child in self.registrations if child.parent in components]
        return [*item.dependencies, item.parent, *children]


class _Mocks(mocks.Mocks):
    def __init__(self, recording: Recording, outputs: Mapping[str, Outputs], calls: Mapping[str, Call]) -> None:
        self.recording, self.outputs, self.calls = recording, outputs, calls

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]] | None]:
        self.recording.calls.append((args.token, args.args))
        function = self.calls.get(args.token)
        assert function, f"no mock of the call {args.token}: add it to CALLS of the cloud's mocks"
        return function(args.args), []

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        computed = self.outputs.get(args.typ, lambda name, inputs: {})(args.name, args.inputs)
        return f"{args.name}-id", {"name": args.name, **args.inputs, **computed}


class _Monitor(mocks.MockMonitor):
    """A mock monitor that also records parent, dependencies and options, which `Mocks.new_resource` lacks."""

    def __init__(self, fake: _Mocks) -> None:
        super().__init__(fake)
        self.recording = fake.recording

    def RegisterResource(self, request: Any) -> Any:
        response = super().RegisterResource(request)
        if request.type != "pulumi:pulumi:Stack":
            inputs = pulumi.runtime.rpc.deserialize_properties(request.object)
            self.recording.registrations.append(_registration(request, response.urn, inputs))
        return response


def _registration(request: Any, urn: str, inputs: Mapping[str, Any]) -> Registration:
    provider = request.provider or next(iter(request.providers.values()), "")
    return Registration(
        type=request.type,
        name=request.name,
        urn=urn,
        parent=request.parent,
        inputs=inputs,
        provider=provider.rpartition("::")[0],
        dependencies=frozenset(request.dependencies),
        retained=request.retainOnDelete,
        protected=bool(request.protect),
        custom=request.custom,
        ignored=tuple(request.ignoreChanges),
        deleted_first=request.deleteBeforeReplace,
        deleted_with=request.deletedWith,
    )


@functools.cache
def cloud_tables() -> tuple[dict[str, Outputs], dict[str, Call]]:
    """Return the combined tables of all clouds; no two clouds share a token."""
    outputs: dict[str, Outputs] = {}
    calls: dict[str, Call] = {}
    for found in pkgutil.iter_modules(cloud_mocks.__path__):
        module = importlib.import_module(f"{cloud_mocks.__name__}.{found.name}")
        outputs |= module.OUTPUTS
        calls |= module.CALLS
    return outputs, calls


def record(program: Callable[[], object], config: Mapping[str, str], stack: str) -> Recording:
    """Run `program` with mocks until all registrations are complete, or return the recording with its `error`."""
    recording = Recording()
    outputs, calls = cloud_tables()
    # Pulumi keeps its state in context variables; a separate context hides the state of earlier stacks.
    contextvars.Context().run(_run, program, config, stack, _Monitor(_Mocks(recording, outputs, calls)), recording)
    return recording


def _run(
    program: Callable[[], object], config: Mapping[str, str], stack: str, monitor: _Monitor, recording: Recording
) -> None:
    asyncio.set_event_loop(_loop())
    runtime_settings.set_root_resource(None)
    mocks.set_mocks(monitor.mocks, project=PROJECT, stack=stack, monitor=monitor)
    runtime_settings.SETTINGS.root_directory = str(ROOT)
    pulumi.runtime.set_all_config(dict(config), [])
    try:
        # The program itself asks an Azure registry for a token, which no mock of a provider can answer.
        with mock.patch("urllib.request.urlopen", _registry_token):
            _sync_await(run_pulumi_func(lambda: _discard(program())))
        exported = runtime_settings.get_root_resource().outputs
        _sync_await(_resolve(exported, recording))
    except Exception as error:
        recording.error = error


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for all stacks.

    A failed stack leaves tasks behind that the next stack must wait for, so all share one loop. It is not the current
    loop, because storage clients leave the loop of one of their threads there.
    """
    return asyncio.new_event_loop()


def _registry_token(*_: object) -> io.BytesIO:
    """Answer like the authentication server of an Azure registry."""
    return io.BytesIO(b'{"refresh_token": "acr-refresh-token"}')


def _discard(_: object) -> None:
    """Discard the program's return value: Pulumi waits only for registrations."""


async def _resolve(exported: Mapping[str, Any], recording: Recording) -> None:
    for key, value in exported.items():
        output = pulumi.Output.from_input(value)
        recording.exports[key] = await output.future()
        if await output.is_secret():
            recording.secret_exports.add(key)


def stack_config(stack: str, overrides: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the configuration of `Pulumi.<stack>.yaml` as the engine passes it to the program.

    Overrides are paths (`gpu.nodes.max`) or full keys (`aws:region`); None removes the key. The program runs inside the
    network, which leaves the API private, unless an override names another way to it.
    """
    changes = _with_api_access(stack, overrides or {})
    values = dict(stack_files.read(stack, {path: value for path, value in changes.items() if value is not None}).values)
    for path, value in changes.items():
        if value is None:
            _remove(values, path)
    return values


#: The keys that decide who reaches the Kubernetes API.
_ACCESS_KEYS = {"network.api_access", "network.authorized_cidrs", "network.dns_endpoint"}


def _with_api_access(stack: str, overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Return the overrides with `network.api_access`, which a cluster of a managed cloud requires."""
    cloud = yaml.safe_load((ROOT / f"Pulumi.{stack}.yaml").read_text())["config"][f"{PROJECT}:cloud"]
    settings = clouds.load(cloud).settings
    on_service = overrides.get("job.launcher") in settings.services
    if "network" not in settings.model_fields or on_service or _ACCESS_KEYS & overrides.keys():
        return overrides
    return {**overrides, "network.api_access": "inside"}


def _remove(values: dict[str, str], path: str) -> None:
    """Remove a top-level key, or a key of a section, from a raw configuration."""
    section, _, name = path.partition(".")
    key = section if ":" in section else f"{PROJECT}:{section}"
    if not name:
        del values[key]
    else:
        values[key] = json.dumps({inner: value for inner, value in json.loads(values[key]).items() if inner != name})


def run_stack(stack: str, overrides: Mapping[str, object] | None = None) -> Recording:
    """Run the real `__main__.py` from the real `Pulumi.<stack>.yaml`."""
    return record(
        lambda: runpy.run_path(str(ROOT / "__main__.py"), run_name="__main__"), stack_config(stack, overrides), stack
    )


def stacks() -> Iterator[str]:
    """Yield the stacks with a settings file and an available cloud."""
    for path in sorted(ROOT.glob("Pulumi.*.yaml")):
        config = yaml.safe_load(path.read_text())["config"]
        if config[f"{PROJECT}:cloud"] in clouds.available():
            yield path.name.split(".")[1]
