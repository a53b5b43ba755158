"""Launchers: ways to start the same pods, one module each."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from workloads.facts import Facts
from workloads.objects.manifest import Manifest


@dataclass(frozen=True)
class JobObjects:
    """The objects of a launcher: `job` owns the pods, and `dependencies` are the objects that it refers to.

    `job` is None if the user starts it with another program.
    """

    job: Manifest | None
    dependencies: tuple[Manifest, ...] = ()


class Launcher(Protocol):
    """The interface of a launcher's module."""

    def build(self, facts: Facts, config_map: str) -> JobObjects:
        """Return the objects that train with the settings in `config_map`."""


def load(name: str) -> Launcher:
    """Import the module of a launcher."""
    return cast(Launcher, import_module(f"workloads.launchers.{name}"))
