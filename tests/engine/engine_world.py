"""The simulated clouds' memory: what exists, who may be deleted while what else exists, and the faults to come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import engine_sdk
from engine_values import UNKNOWN, at, differences, has_unknown, leaves

Inputs = dict[str, Any]


class Refused(Exception):  # noqa: N818 - the cloud's answer, not a mistake of ours
    """What a cloud answers to a request that it does not carry out."""


class ConnectionLost(Exception):  # noqa: N818
    """The provider goes away instead of answering."""


@dataclass
class Thing:
    """One resource that exists: its inputs and what the cloud computed, both plain (no secrets' wrappers)."""

    type: str
    id: str
    name: str
    physical: str
    inputs: Inputs
    computed: Inputs

    @property
    def handles(self) -> set[str]:
        """The values by which other resources point at this one."""
        names = ("name", "bucket", "arn", "allocationId", "keyId")
        found = {self.computed.get(key, self.inputs.get(key)) for key in names}
        return {self.id, *(one for one in found if isinstance(one, str) and one)}

    def points_at(self, other: Thing) -> bool:
        """Whether an input of this one is an identifier of the other."""
        return not other.handles.isdisjoint(leaf for leaf in leaves(self.inputs) if isinstance(leaf, str))


@dataclass(frozen=True)
class Rules:
    """How one type of resource behaves; `held_by` maps the types that keep it from being deleted to the cloud's words.

    `identity` is its identifier, `computed` what the cloud answers beside the inputs; `ignored` makes no difference.
    `turn` names what two requests must not change at the same time. The hooks raise `Refused`.
    """

    replaced_by: tuple[str, ...] = ()
    held_by: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[str, Inputs], Inputs] = lambda name, inputs: {}
    identity: Callable[[str, Inputs], str] | None = None
    problems: Callable[[Inputs], Iterable[tuple[str, str]]] = lambda inputs: ()
    replaces: Callable[[Inputs, Inputs], Iterable[str]] = lambda old, new: ()
    ignored: tuple[str, ...] = ()
    on_create: Callable[[World, Inputs], None] = lambda world, inputs: None
    on_update: Callable[[World, Thing, Inputs], None] = lambda world, thing, inputs: None
    on_delete: Callable[[World, Thing], None] = lambda world, thing: None
    turn: Callable[[Inputs], str | None] = lambda inputs: None


@dataclass
class Faults:
    """What goes wrong next; each happens once, `delay_seconds` at every create."""

    fail_create: int | None = None
    lose_create: int | None = None
    refuse_delete: set[str] = field(default_factory=set)
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class Change:
    """How an update would go: what differs, what of it needs a replacement, and whether the old one must go first."""

    paths: tuple[str, ...]
    replaces: tuple[str, ...]
    deletes_first: bool = False


#: How long a request holds its turn: enough for one that does not wait to be seen.
_TURN_SECONDS = 0.02


class World:
    """Everything that exists in the simulated clouds of one test, by type and identifier."""

    def __init__(self, rules: Callable[[str], Rules]) -> None:
        self.things: dict[tuple[str, str], Thing] = {}
        self.faults = Faults()
        self.log: list[tuple[str, str, str]] = []
        self.calls: Counter[str] = Counter()
        self.kubeconfig = ""
        self._rules, self._lock, self._number, self._creates = rules, threading.RLock(), 0, 0
        self._turns: set[str] = set()

    def of_type(self, *types: str) -> list[Thing]:
        """What exists of these types."""
        return [thing for thing in list(self.things.values()) if thing.type in types]

    def users(self, thing: Thing, types: Iterable[str]) -> list[Thing]:
        """What exists of these types and points at `thing`."""
        return [other for other in self.of_type(*types) if other is not thing and other.points_at(thing)]

    def number(self) -> str:
        """Seven hexadecimal digits that no other name ends with."""
        with self._lock:
            self._number += 1
            return f"{self._number:07x}"

    def check(self, token: str, inputs: Inputs) -> list[tuple[str, str]]:
        """Every input that the SDK's types or the service's own rules refuse."""
        found = list(engine_sdk.problems(token, inputs))
        return found or [
            (path, reason) for path, reason in self._rules(token).problems(inputs) if not has_unknown(at(inputs, path))
        ]

    def diff(self, token: str, old: Inputs, new: Inputs) -> Change:
        """What an update from old to new inputs would do."""
        rules = self._rules(token)
        paths = tuple(path for path in differences(old, new) if not _below(path, rules.ignored))
        forced = [path for path in paths if _below(path, rules.replaced_by)]
        replaces = tuple(dict.fromkeys([*forced, *rules.replaces(old, new)]))
        return Change(paths, replaces, bool(replaces) and token.startswith("kubernetes:") and _same_name(old, new))

    def create(self, token: str, name: str, inputs: Inputs) -> Thing:
        """Make it, unless a fault or a rule keeps it from being made."""
        rules = self._rules(token)
        self._fail_as_told(token, name)
        with self._turn(rules.turn(inputs)), self._lock:
            rules.on_create(self, inputs)
            physical = f"{name}-{self.number()}"
            identifier = rules.identity(physical, inputs) if rules.identity else physical
            if (token, identifier) in self.things:
                raise Refused(f"{token} {identifier} already exists")
            thing = Thing(token, identifier, name, physical, inputs, _computed(rules, physical, inputs))
            self.things[token, identifier] = thing
            self.log.append(("create", token, name))
            return thing

    def plan(self, token: str, name: str, inputs: Inputs) -> Inputs:
        """What a preview answers beside the inputs: of what the cloud will compute, that there will be something."""
        try:
            computed = _computed(self._rules(token), name, inputs)
        except (KeyError, TypeError, IndexError):
            # An input that the answer is made from is not known yet; the engine takes what is missing for unknown.
            return {}
        return {key: _unknown_unless_given(value, inputs.get(key)) for key, value in computed.items()}

    def plan_update(self, token: str, identifier: str, inputs: Inputs) -> Inputs:
        """What a preview of an update answers: what the cloud computed stays."""
        thing = self.find(token, identifier)
        return thing.computed if thing else {}

    def update(self, token: str, identifier: str, inputs: Inputs) -> Thing:
        """Change it in place."""
        rules = self._rules(token)
        with self._turn(rules.turn(inputs)), self._lock:
            thing = self.find(token, identifier)
            if thing is None:
                raise Refused(f"{token} {identifier} does not exist")
            rules.on_update(self, thing, inputs)
            thing.inputs = inputs
            thing.computed |= _computed(rules, thing.physical, inputs)
            self.log.append(("update", token, thing.name))
            return thing

    def delete(self, token: str, identifier: str) -> None:
        """Take it away, unless something that exists needs it; what is gone already may be deleted again."""
        thing = self.find(token, identifier)
        if thing is None:
            return
        rules = self._rules(token)
        with self._turn(rules.turn(thing.inputs)), self._lock:
            if token in self.faults.refuse_delete:
                self.faults.refuse_delete.discard(token)
                raise Refused(f"deleting {identifier}: the service is busy, try again")
            for holder, words in rules.held_by.items():
                users = self.users(thing, [holder])
                if users:
                    raise Refused(f"{words}: {identifier} is in use by {users[0].type} {users[0].name}")
            rules.on_delete(self, thing)
            self.things.pop((token, identifier), None)
            self.log.append(("delete", token, thing.name))

    def find(self, token: str, identifier: str) -> Thing | None:
        """What exists under this identifier."""
        return self.things.get((token, identifier))

    def remove(self, thing: Thing) -> None:
        """It goes together with what contained it."""
        self.things.pop((thing.type, thing.id), None)

    def add(self, token: str, identifier: str, inputs: Inputs) -> Thing:
        """Something that somebody else made: a job's checkpoint, an interface that was left behind."""
        return self.things.setdefault((token, identifier), Thing(token, identifier, identifier, identifier, inputs, {}))

    def _fail_as_told(self, token: str, name: str) -> None:
        """The injected faults of a create; a provider that goes away has made nothing."""
        time.sleep(self.faults.delay_seconds)
        with self._lock:
            self._creates += 1
            if self.faults.fail_create is not None:
                self.faults.fail_create -= 1
                if self.faults.fail_create == 0:
                    self.faults.fail_create = None
                    raise Refused(f"InsufficientInstanceCapacity: {token} {name} cannot be made now (injected)")
            if self.faults.lose_create is not None:
                self.faults.lose_create -= 1
                if self.faults.lose_create == 0:
                    self.faults.lose_create = None
                    raise ConnectionLost

    @contextmanager
    def _turn(self, key: str | None) -> Iterator[None]:
        if key is None:
            yield
            return
        with self._lock:
            if key in self._turns:
                raise Refused(f"OperationAborted: another operation on {key} is in progress")
            self._turns.add(key)
        try:
            time.sleep(_TURN_SECONDS)
            yield
        finally:
            self._turns.discard(key)


def _computed(rules: Rules, physical: str, inputs: Inputs) -> Inputs:
    """What the cloud answers: its own name where none was given, and whatever the type's rules say."""
    return {"name": inputs.get("name") or physical, **rules.computed(physical, inputs)}


def _unknown_unless_given(value: Any, given: Any) -> Any:
    """An answer with every part that is not an input's replaced by the mark for what is unknown."""
    if value == given:
        return value
    if isinstance(value, dict) and isinstance(given, dict):
        return {key: _unknown_unless_given(item, given.get(key)) for key, item in value.items()}
    return UNKNOWN


def _below(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a changed path is one of these or inside one of them."""
    return any(path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")) for prefix in prefixes)


def _same_name(old: Inputs, new: Inputs) -> bool:
    """Whether two Kubernetes objects cannot exist beside each other."""
    return all(at(old, f"metadata.{key}") == at(new, f"metadata.{key}") for key in ("name", "namespace"))
