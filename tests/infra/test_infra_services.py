"""The keys and stacks that each training service supports, and the resources that all services share."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable

import dill
import pytest
from provider_mocks.recording import Recording
from pulumi.dynamic.dynamic import serialize_provider

IMAGE = {"job.image": "registry.example/trainer@sha256:" + "0" * 64}


@pytest.mark.parametrize(
    ("stack_name", "launcher", "overrides", "key", "fix"),
    [
        ("aws", "azureml", {}, "job.launcher", "pulumi config set --path job.launcher pytorchjob"),
        ("aws", "vertex", {}, "job.launcher", "pulumi config set --path job.launcher pytorchjob"),
        ("azure", "vertex", {}, "job.launcher", "pulumi config set --path job.launcher pytorchjob"),
        ("gcp", "azureml", {}, "job.launcher", "pulumi config set --path job.launcher pytorchjob"),
        ("local", "vertex", {}, "job.launcher", "pulumi config set --path job.launcher pytorchjob"),
        ("gcp", "vertex", {"job.tensorboard.enabled": False}, "job.tensorboard.enabled", "pulumi config rm"),
        ("gcp", "vertex", {"job.netcheck.enabled": True}, "job.netcheck.enabled", "pulumi config rm"),
        ("gcp", "vertex", {"job.dataset.source": "bucket"}, "job.dataset.source", "pulumi config rm"),
        ("gcp", "vertex", {"job.min_nodes": 1}, "job.min_nodes", "pulumi config rm --path job.min_nodes"),
        ("gcp", "vertex", {"addons.kueue": True}, "addons.kueue", "pulumi config rm --path addons.kueue"),
        ("gcp", "vertex", {"cluster.location": "zonal"}, "cluster.location", "pulumi config rm"),
        ("gcp", "vertex", {"network.dns_endpoint": True}, "network.dns_endpoint", "pulumi config rm"),
        ("gcp", "vertex", {"gpu.nodes.min": 1}, "gpu.nodes.min", "pulumi config rm --path gpu.nodes.min"),
        ("gcp", "vertex", {"storage.size_gib": 2048}, "storage.size_gib", "pulumi config rm"),
        ("gcp", "vertex", {"vertex.queue_hours": 3}, "vertex.queue_hours", "pulumi config rm"),
        ("gcp", "pytorchjob", {"vertex.tensorboard": False}, "vertex.tensorboard", "pulumi config rm"),
        ("azure", "azureml", {"storage.tier": "Ultra"}, "storage.tier", "pulumi config rm --path storage.tier"),
        ("azure", "azureml", {"gpu.zone": 1}, "gpu.zone", "pulumi config rm --path gpu.zone"),
        ("azure", "azureml", {"cluster.kubernetes_version": "1.34"}, "cluster.kubernetes_version", "pulumi config rm"),
        ("azure", "azureml", {"job.egress": ["10.0.0.0/8:1"]}, "job.egress", "pulumi config rm"),
        ("azure", "pytorchjob", {"azureml.idle_minutes": 9}, "azureml.idle_minutes", "pulumi config rm"),
    ],
)
def test_a_key_without_effect_is_rejected_with_its_fix(
    stack_name: str,
    launcher: str,
    overrides: dict[str, object],
    key: str,
    fix: str,
    stack: Callable[..., Recording],
) -> None:
    recording = stack(stack_name, IMAGE | {"job.launcher": launcher} | overrides, fails=True)
    message = str(recording.error)
    assert type(recording.error).__name__ == "RunError", message
    (line,) = [line for line in message.splitlines() if line.strip().startswith(f"{key}: ")]
    assert f"Fix: {fix}" in message, line
    assert message.count("Fix:") == 1, f"one mistake is one problem: {message}"
    assert recording.registrations == []


def test_azureml_rejects_a_capacity_reservation(stack: Callable[..., Recording]) -> None:
    group = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/g/providers/Microsoft.Compute/"
    reservation = {"gpu.capacity": "reservation", "gpu.reservation_id": f"{group}capacityReservationGroups/r"}
    recording = stack("azure", IMAGE | {"job.launcher": "azureml"} | reservation, fails=True)
    assert "pulumi config set --path gpu.capacity on_demand" in str(recording.error)


def test_the_service_is_no_key(stack: Callable[..., Recording]) -> None:
    recording = stack("gcp", {"service": "vertex"}, fails=True)
    assert "set by job.launcher" in str(recording.error)


def test_a_budget_is_compared_with_the_costs_of_the_service(stack: Callable[..., Recording]) -> None:
    # Two machines at 29.387; system nodes, disks and addresses of a cluster exceed it.
    budget = {"budget.max_usd_per_hour": 58.78}
    assert stack("gcp", IMAGE | {"job.launcher": "vertex"} | budget).error is None
    assert "budget.max_usd_per_hour" in str(stack("gcp", IMAGE | budget, fails=True).error)


@pytest.mark.parametrize(("stack_name", "launcher"), [("gcp", "vertex"), ("azure", "azureml")])
def test_the_image_is_pushed_to_the_services_registry(
    stack_name: str, launcher: str, stack: Callable[..., Recording]
) -> None:
    recording = stack(stack_name, {"job.launcher": launcher})
    image = recording.one("docker-build:index:Image")
    assert image.inputs["tags"][0].startswith(recording.exports["registry"])
    assert image.inputs["buildArgs"]["ACCELERATOR"] == "gpu"


@pytest.mark.parametrize(
    ("module", "name"),
    [("infra.clouds.gcp.vertex", "CustomJobProvider"), ("infra.clouds.azure.running", "RunningJobProvider")],
)
def test_an_existing_state_finds_its_provider(module: str, name: str) -> None:
    provider = getattr(importlib.import_module(module), name)()
    text = base64.b64decode(serialize_provider(provider))
    assert module.encode() in text, (
        "states refer to the provider by its module: if it moves, existing stacks cannot be destroyed"
    )
    assert len(text) < 200, "a provider with values would change with each of them"
    assert type(dill.loads(text)) is type(provider)


@pytest.mark.parametrize(("stack_name", "launcher"), [("gcp", "vertex"), ("azure", "azureml")])
def test_every_resource_is_a_child_of_a_component(
    stack_name: str, launcher: str, stack: Callable[..., Recording]
) -> None:
    recording = stack(stack_name, IMAGE | {"job.launcher": launcher})
    orphans = [item.name for item in recording.registrations if item.custom and not item.parent_name]
    assert not orphans, "a resource outside a component lacks its options and its deletion order"
