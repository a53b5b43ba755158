"""The ways to start the same pods: one module each, found by its name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from workloads.facts import Facts
from workloads.objects.names import Manifest


@dataclass(frozen=True)
class Launched:
    """What a launcher makes: `job` is the object that owns the pods, `before` what it refers to.

    `job` is None where a person starts it with another program, as the launcher's own documentation says.
    """

    job: Manifest | None
    before: tuple[Manifest, ...] = ()


class Launcher(Protocol):
    """A launcher's module."""

    def launched(self, facts: Facts, config_map: str) -> Launched:
        """The objects that train with the settings in `config_map`."""


def load(name: str) -> Launcher:
    """The module of a launcher that the settings allow."""
    return cast(Launcher, import_module(f"workloads.launchers.{name}"))
