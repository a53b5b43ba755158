"""The component that registers the training's objects."""

from __future__ import annotations

import pytest
from provider_mocks.recording import run_stack

from workloads import component
from workloads.facts import Facts
from workloads.objects.manifest import Manifest


def test_manifests_are_built_twice_for_all_objects_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with placeholders for the keys of the objects, and once with the values of the cloud."""
    uris = []
    real = component.build_manifests

    def build_manifests(facts: Facts) -> dict[str, Manifest]:
        uris.append(facts.checkpoint_uri)
        return real(facts)

    monkeypatch.setattr(component, "build_manifests", build_manifests)
    recording = run_stack("local")
    assert recording.error is None
    assert len(uris) == 2, "not once per object"
    assert "<checkpoints>" in uris
