"""Google Cloud: the roles of nodes and of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gcp_stack import CLUSTER, POOL, Stack, parse_settings
from provider_mocks.recording import Recording, Registration


def _grants(recording: Recording) -> Iterator[Registration]:
    """Yield the resources that grant a role."""
    yield from (item for item in recording.registrations if item.type.startswith("gcp:") and "role" in item.inputs)


def test_no_principal_is_owner_editor_or_administrator(a3: Recording) -> None:
    roles = {item.inputs["role"] for item in _grants(a3)}
    assert len(roles) >= 6
    assert not roles & {"roles/owner", "roles/editor", "roles/viewer"}
    assert not [role for role in roles if "admin" in role.lower()]
    assert not [item.inputs["member"] for item in _grants(a3) if item.inputs["member"].startswith("all")]


def test_grants_never_remove_other_grants(a3: Recording) -> None:
    kinds = {item.type.rpartition(":")[2] for item in a3.registrations if "iam" in item.type.lower()}
    assert all(kind.lower().endswith("iammember") for kind in kinds), "a binding or policy would remove other grants"


def test_the_nodes_may_write_logs_and_metrics_and_pull_this_stacks_images(stack: Stack) -> None:
    recording = stack("gcp")
    nodes = [item for item in _grants(recording) if "-nodes-" in item.inputs["member"]]
    assert {item.inputs["role"] for item in nodes} == {
        "roles/container.defaultNodeServiceAccount",
        "roles/artifactregistry.reader",
    }
    reader = recording.one("gcp:artifactregistry/repositoryIamMember:RepositoryIamMember")
    assert reader.inputs["repository"] == "torchrec-cloud-gcp"
    on_project = recording.of_type("gcp:projects/iAMMember:IAMMember")
    assert [item.inputs["role"] for item in on_project] == ["roles/container.defaultNodeServiceAccount"]


def test_no_pool_runs_as_the_projects_default_account(stack: Stack) -> None:
    recording = stack("gcp")
    configs = [item.inputs["nodeConfig"] for item in (*recording.of_type(POOL), recording.one(CLUSTER))]
    assert all(config["serviceAccount"].startswith("gcp-nodes-") for config in configs), "it may edit the whole project"


def test_the_trainer_may_only_read_its_bucket_and_write_its_checkpoints(stack: Stack) -> None:
    recording = stack("gcp")
    trainer = [item for item in _grants(recording) if "-trainer-" in item.inputs["member"]]
    assert {item.type for item in trainer} == {"gcp:storage/bucketIAMMember:BucketIAMMember"}
    assert {item.inputs["bucket"] for item in trainer} == {"gcp-storage-bucket-0a1b2c3"}
    by_role = {item.inputs["role"]: item.inputs.get("condition") for item in trainer}
    assert set(by_role) == {"roles/storage.objectViewer", "roles/storage.objectUser"}
    writes = by_role["roles/storage.objectUser"]
    assert writes["expression"] == (
        'resource.name.startsWith("projects/_/buckets/gcp-storage-bucket-0a1b2c3/objects/checkpoints/")'
    )


def test_only_the_trainers_pods_use_the_trainers_account(stack: Stack) -> None:
    recording = stack("gcp", {"namespace": "ads"})
    grant = recording.one("gcp:serviceaccount/iAMMember:IAMMember")
    assert grant.inputs["role"] == "roles/iam.workloadIdentityUser"
    assert grant.inputs["member"] == "serviceAccount:my-project.svc.id.goog[ads/trainer]"
    assert "trainer" in grant.inputs["serviceAccountId"]
    assert recording.needs(grant, recording.one(CLUSTER)), "the first cluster creates the pool of identities"


def test_no_service_account_has_a_key(a3: Recording) -> None:
    assert not [item.name for item in a3.registrations if item.type.startswith("gcp:serviceaccount/key")]


@pytest.mark.parametrize("name", ["a", "gcp", "a-rather-long-one"])
@pytest.mark.parametrize("role", ["nodes", "trainer"])
def test_a_service_accounts_id_is_valid_for_any_stack_name(name: str, role: str) -> None:
    from infra.clouds.gcp.settings import account_id

    found = account_id(parse_settings(name=name), role)
    assert 6 <= len(found) <= 30
    assert role in found
    assert found != account_id(parse_settings(name=f"b{name}"[:17].rstrip("-")), role), (
        "stacks must not share an account"
    )
