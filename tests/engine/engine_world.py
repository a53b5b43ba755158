"""The state of the simulated clouds: existing resources, rules for changing them, and pending faults."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import engine_sdk
from engine_clock import Clock, Interrupted
from engine_refusals import ConnectionLost, PartlyCreated, Refused
from engine_values import at, differences, has_unknown, is_below, leaves, unknown_unless_given

__all__ = ["LAPTOP", "ConnectionLost", "Faults", "Inputs", "PartlyCreated", "Refused", "Resource", "Rules", "World"]

#: The public address of a laptop that runs `pulumi` (RFC 5737).
LAPTOP = "203.0.113.7"

Inputs = dict[str, Any]
ACTIVE = "ACTIVE"


@dataclass
class Resource:
    """One existing resource: its inputs and computed outputs, both with secrets unwrapped.

    `status` is CREATING, ACTIVE, UPDATING, DELETING, or what a `PartlyCreated` set; `created_at` is in minutes.
    """

    type: str
    id: str
    name: str
    physical: str
    inputs: Inputs
    computed: Inputs
    status: str = ACTIVE
    created_at: float = 0.0

    @property
    def identifiers(self) -> set[str]:
        """The values by which other resources refer to this one."""
        names = ("name", "bucket", "arn", "allocationId", "keyId")
        found = {self.computed.get(key, self.inputs.get(key)) for key in names}
        return {self.id, *(one for one in found if isinstance(one, str) and one)}

    def refers_to(self, other: Resource) -> bool:
        """Return whether an input contains an identifier of the other resource."""
        return not other.identifiers.isdisjoint(leaf for leaf in leaves(self.inputs) if isinstance(leaf, str))


@dataclass(frozen=True)
class Rules:
    """How one type of resource behaves.

    `held_by` maps each type that blocks a deletion to the cloud's error. `identity` returns the identifier and
    `computed` the outputs; changes of `ignored` paths are not a difference, and `changed` returns more differences.
    `lock_key` names what two requests must not change at the same time; `max_name` limits a generated name.
    `..._minutes` is how long an operation takes: `on_create`, `on_update`, `on_delete` run at its start, `on_created`,
    `on_updated` (with the old inputs) and `on_deleted` at its end. The hooks raise `Refused`; `on_created` and
    `on_updated` may raise `PartlyCreated`.
    """

    replaced_by: tuple[str, ...] = ()
    held_by: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[str, Inputs], Inputs] = lambda name, inputs: {}
    identity: Callable[[str, Inputs], str] | None = None
    problems: Callable[[Inputs], Iterable[tuple[str, str]]] = lambda inputs: ()
    replaces: Callable[[Inputs, Inputs], Iterable[str]] = lambda old, new: ()
    ignored: tuple[str, ...] = ()
    changed: Callable[[World, Resource, Inputs], Iterable[str]] = lambda world, resource, inputs: ()
    on_create: Callable[[World, Inputs], None] = lambda world, inputs: None
    on_update: Callable[[World, Resource, Inputs], None] = lambda world, resource, inputs: None
    on_delete: Callable[[World, Resource], None] = lambda world, resource: None
    lock_key: Callable[[Inputs], str | None] = lambda inputs: None
    max_name: int | None = None
    create_minutes: Callable[[Inputs], float] = lambda inputs: 0.0
    update_minutes: Callable[[Inputs, Inputs], float] = lambda old, new: 0.0
    delete_minutes: Callable[[Inputs], float] = lambda inputs: 0.0
    on_created: Callable[[World, Resource], None] = lambda world, resource: None
    on_updated: Callable[[World, Resource, Inputs], None] = lambda world, resource, old: None
    on_deleted: Callable[[World, Resource], None] = lambda world, resource: None


@dataclass
class Faults:
    """The pending faults. Each happens once, except `delay_seconds`, which applies to every create.

    `nodes_available` is how many GPU nodes a cloud can start in one pool, None for any number.
    """

    fail_create: int | None = None
    lose_create: int | None = None
    refuse_delete: set[str] = field(default_factory=set)
    delay_seconds: float = 0.0
    nodes_available: int | None = None


@dataclass(frozen=True)
class Change:
    """A planned update: changed paths, those that force a replacement, and whether the old one is deleted first."""

    paths: tuple[str, ...]
    replaces: tuple[str, ...]
    deletes_first: bool = False


#: How long a request holds its lock: long enough for a concurrent request to fail.
_LOCK_SECONDS = 0.02


class World:
    """Everything that exists in the simulated clouds of one test, by type and identifier."""

    def __init__(self, rules: Callable[[str], Rules]) -> None:
        self.resources: dict[tuple[str, str], Resource] = {}
        self.faults = Faults()
        self.log: list[tuple[str, str, str]] = []
        self.calls: Counter[str] = Counter()
        self.kubeconfig = ""
        #: The address of the machine that runs `pulumi`: a laptop's, or one of 10.0.0.0/8 inside the network.
        self.machine = LAPTOP
        self.is_lenient = False  # ignore refusals, to let an older program write its state
        self.authority = ""  # of the API server's certificate, as a kubeconfig holds it
        self._rules, self._lock, self._number, self._creates = rules, threading.RLock(), 0, 0
        self._locked: set[str] = set()
        self.clock = Clock(self._lock)

    @property
    def now(self) -> float:
        """Simulated minutes since the world began."""
        return self.clock.now

    def later(self, minutes: float, callback: Callable[[], None]) -> None:
        """Let the cloud do something by itself at `now + minutes`."""
        self.clock.later(minutes, callback)

    def ready(self, *types: str) -> list[Resource]:
        """Return the resources of these types that work: neither in creation, nor failed, nor in deletion."""
        return [resource for resource in self.of_type(*types) if resource.status in (ACTIVE, "UPDATING")]

    def of_type(self, *types: str) -> list[Resource]:
        """Return the existing resources of these types, whatever their status."""
        return [resource for resource in list(self.resources.values()) if resource.type in types]

    def users(self, resource: Resource, types: Iterable[str]) -> list[Resource]:
        """Return the resources of these types that refer to `resource`."""
        return [other for other in self.of_type(*types) if other is not resource and other.refers_to(resource)]

    def next_suffix(self) -> str:
        """Return seven hexadecimal digits that are unique in this world."""
        with self._lock:
            self._number += 1
            return f"{self._number:07x}"

    def check(self, token: str, inputs: Inputs, name: str = "") -> list[tuple[str, str]]:
        """Return every input that the SDK's types or the service's rules reject."""
        if self.is_lenient:
            return []
        found = list(engine_sdk.problems(token, inputs))
        self.clock.touch()
        rules = self._rules(token)
        # `NewUniqueHex` in pulumi/sdk/go/common/resource/resource_name.go: a separator and seven random digits.
        if rules.max_name and not inputs.get("name") and len(name) + 8 > rules.max_name:
            reason = f"name '{name}-' plus 7 random chars is longer than maximum length {rules.max_name}"
            found.append(("name", reason))
        return found or [(path, reason) for path, reason in rules.problems(inputs) if not has_unknown(at(inputs, path))]

    def diff(self, token: str, old: Inputs, new: Inputs, identifier: str = "") -> Change:
        """Return what an update from old to new inputs would do."""
        self.clock.touch()
        rules = self._rules(token)
        paths = tuple(path for path in differences(old, new) if not is_below(path, rules.ignored))
        if found := self.find(token, identifier):
            paths += tuple(rules.changed(self, found, new))
        forced = [path for path in paths if is_below(path, rules.replaced_by)]
        replaces = tuple(dict.fromkeys([*forced, *rules.replaces(old, new)]))
        return Change(paths, replaces, bool(replaces) and token.startswith("kubernetes:") and _same_name(old, new))

    def create(self, token: str, name: str, inputs: Inputs) -> Resource:
        """Create a resource, or raise if a fault or a rule prevents it."""
        rules = self._rules(token)
        self._inject_fault(token, name)
        with self._exclusive(rules.lock_key(inputs)), self._lock:
            self._ask(rules.on_create, self, inputs)
            physical = f"{name}-{self.next_suffix()}"
            identifier = rules.identity(physical, inputs) if rules.identity else physical
            if (token, identifier) in self.resources:
                raise Refused(f"{token} {identifier} already exists")
            computed = _computed(rules, physical, inputs)
            resource = Resource(token, identifier, name, physical, inputs, computed, "CREATING", self.now)
            self.resources[token, identifier] = resource
            self._finish_create(rules, resource)
            self.log.append(("create", token, name))
            return resource

    def _ask(self, hook: Callable[..., None], *arguments: object) -> None:
        with suppress(*((Refused, PartlyCreated) if self.is_lenient else ())):
            hook(*arguments)

    def _finish_create(self, rules: Rules, resource: Resource) -> None:
        """Wait until the resource is created; a refusal at the end removes it, unless it was partly created."""
        try:
            self.wait(rules.create_minutes(resource.inputs))
            self._ask(rules.on_created, self, resource)
        except PartlyCreated as failure:
            resource.status, failure.resource = failure.status, resource
            self.log.append(("create", resource.type, resource.name))
            raise
        except (Refused, ConnectionLost):
            # After a lost connection a real cloud would continue, which no program can prevent.
            self.remove(resource)
            raise
        resource.status = ACTIVE

    def wait(self, minutes: float) -> None:
        """Let an operation take its time; the world is unlocked meanwhile."""
        try:
            self.clock.wait(minutes)
        except Interrupted:
            raise ConnectionLost from None
        finally:
            self.clock.touch()

    def plan(self, token: str, name: str, inputs: Inputs) -> Inputs:
        """Return the outputs that a preview adds to the inputs; values that the cloud will compute are unknown."""
        try:
            computed = _computed(self._rules(token), name, inputs)
        except (KeyError, TypeError, IndexError):
            # An input that the outputs depend on is still unknown; the engine treats missing outputs as unknown.
            return {}
        return {key: unknown_unless_given(value, inputs.get(key)) for key, value in computed.items()}

    def plan_update(self, token: str, identifier: str, inputs: Inputs) -> Inputs:
        """Return the outputs in the preview of an update: they do not change."""
        resource = self.find(token, identifier)
        return resource.computed if resource else {}

    def update(self, token: str, identifier: str, inputs: Inputs) -> Resource:
        """Update a resource in place."""
        rules = self._rules(token)
        with self._exclusive(rules.lock_key(inputs)), self._lock:
            resource = self.find(token, identifier)
            if resource is None:
                raise Refused(f"{token} {identifier} does not exist")
            rules.on_update(self, resource, inputs)
            self._finish_update(rules, resource, inputs)
            self.log.append(("update", token, resource.name))
            return resource

    def _finish_update(self, rules: Rules, resource: Resource, inputs: Inputs) -> None:
        """Wait until the resource is updated; a refusal at the end leaves it as it was."""
        before, old, resource.status = resource.status, resource.inputs, "UPDATING"
        try:
            self.wait(rules.update_minutes(old, inputs))
            resource.inputs = inputs
            rules.on_updated(self, resource, old)
        except PartlyCreated as failure:
            resource.status, failure.resource = failure.status, resource
            raise
        except (Refused, ConnectionLost):
            resource.inputs, resource.status = old, before
            raise
        resource.computed |= _computed(rules, resource.physical, inputs)
        # An update does not repair what failed to be created; a rule that repairs it sets the status itself.
        resource.status = before if resource.status == "UPDATING" else resource.status

    def delete(self, token: str, identifier: str) -> None:
        """Delete a resource unless another one needs it; deleting a missing one succeeds."""
        resource = self.find(token, identifier)
        if resource is None:
            return
        rules = self._rules(token)
        with self._exclusive(rules.lock_key(resource.inputs)), self._lock:
            if token in self.faults.refuse_delete:
                self.faults.refuse_delete.discard(token)
                raise Refused(f"deleting {identifier}: the service is busy, try again")
            for holder, error in rules.held_by.items():
                users = self.users(resource, [holder])
                if users:
                    raise Refused(f"{error}: {identifier} is in use by {users[0].type} {users[0].name}")
            rules.on_delete(self, resource)
            before, resource.status = resource.status, "DELETING"
            try:
                self.wait(rules.delete_minutes(resource.inputs))
            except ConnectionLost:
                resource.status = before
                raise
            self.remove(resource)
            rules.on_deleted(self, resource)
            self.log.append(("delete", token, resource.name))

    def find(self, token: str, identifier: str) -> Resource | None:
        """Return the resource with this identifier, if it exists."""
        return self.resources.get((token, identifier))

    def remove(self, resource: Resource) -> None:
        """Remove a resource, as a cloud does with those inside another one."""
        self.resources.pop((resource.type, resource.id), None)

    def add(self, token: str, identifier: str, inputs: Inputs) -> Resource:
        """Add a resource that Pulumi did not create: a job's checkpoint, a leftover network interface."""
        return self.resources.setdefault(
            (token, identifier), Resource(token, identifier, identifier, identifier, inputs, {})
        )

    def _inject_fault(self, token: str, name: str) -> None:
        """Raise the injected fault of a create, before anything is created."""
        time.sleep(self.faults.delay_seconds)
        self.clock.touch()
        with self._lock:
            self._creates += 1
            if self.faults.fail_create is not None:
                self.faults.fail_create -= 1
                if self.faults.fail_create == 0:
                    self.faults.fail_create = None
                    raise Refused(f"InsufficientInstanceCapacity: {token} {name} cannot be created now (injected)")
            if self.faults.lose_create is not None:
                self.faults.lose_create -= 1
                if self.faults.lose_create == 0:
                    self.faults.lose_create = None
                    raise ConnectionLost

    @contextmanager
    def _exclusive(self, key: str | None) -> Iterator[None]:
        if key is None or self.is_lenient:
            yield
            return
        with self._lock:
            if key in self._locked:
                raise Refused(f"OperationAborted: another operation on {key} is in progress")
            self._locked.add(key)
        try:
            time.sleep(_LOCK_SECONDS)
            yield
        finally:
            self._locked.discard(key)


def _computed(rules: Rules, physical: str, inputs: Inputs) -> Inputs:
    """Return the computed outputs: a generated name if none was given, and the outputs of the type's rules."""
    return {"name": inputs.get("name") or physical, **rules.computed(physical, inputs)}


def _same_name(old: Inputs, new: Inputs) -> bool:
    """Return whether two Kubernetes objects have the same name and namespace."""
    return all(at(old, f"metadata.{key}") == at(new, f"metadata.{key}") for key in ("name", "namespace"))
