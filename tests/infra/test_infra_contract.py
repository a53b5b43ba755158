"""The contract test: it runs for every cloud's folder, without a list to edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pulumi
import pytest
from provider_mocks.recording import PROJECT, ROOT, Recording, record, stack_config

from infra import clouds, stack
from infra.addons import charts
from infra.config.settings import ManagedStackSettings, StackSettings
from infra.contract import GPU_LABEL, GPU_TAINT, Cluster
from workloads.settings import SECTIONS

CLOUDS = clouds.available()
BUCKET_URI = re.compile(r"^(s3|abfs|gs|file)://.+")


@dataclass
class Provisioned:
    """One cloud's cluster, its settings and everything registered for it."""

    cluster: Cluster
    settings: StackSettings
    recording: Recording


def _config(cloud: str) -> Mapping[str, str]:
    """Return the repository's stack of a cloud, or only the required keys for a cloud from another repository."""
    if (ROOT / f"Pulumi.{cloud}.yaml").exists():
        return stack_config(cloud)
    own = {"cloud": cloud, "tags": '{"owner": "me", "cost_centre": "tests"}', "network": '{"api_access": "inside"}'}
    return {f"{PROJECT}:{key}": value for key, value in own.items()}


@cache
def _provision(cloud: str) -> Provisioned:
    """Provision a cloud's cluster once."""
    created: list[tuple[Cluster, StackSettings]] = []

    def program() -> None:
        """Create the cluster and export what the tests read."""
        configured = stack.load(sections=SECTIONS)
        cluster = configured.cloud.provision("contract", configured.settings)
        for name in ("name", "kubeconfig", "bucket_uri", "checkpoint_uri"):
            pulumi.export(name, getattr(cluster, name))
        pulumi.export("repository", cluster.registry.repository)
        pulumi.export("annotations", dict(cluster.identity.annotations))
        created.append((cluster, configured.settings))

    recording = record(program, _config(cloud), cloud)
    if recording.error:
        raise recording.error
    return Provisioned(*created[0], recording)


@pytest.fixture(params=CLOUDS)
def provisioned(request: pytest.FixtureRequest, kubeconfig: Path) -> Provisioned:
    """Return each cloud, provisioned once."""
    return _provision(request.param)


def test_the_kubeconfig_is_a_secret(provisioned: Provisioned) -> None:
    assert "kubeconfig" in provisioned.recording.secret_exports, (
        "the state file would contain the kubeconfig in plain text"
    )


def test_the_kubernetes_provider_is_a_child_of_the_cluster(provisioned: Provisioned) -> None:
    provider = provisioned.recording.one("pulumi:providers:kubernetes")
    assert provider.parent_name, "as a sibling, the provider would be deleted before the objects that it deletes"


def test_every_kubernetes_object_uses_the_clusters_own_provider(provisioned: Provisioned) -> None:
    provider = provisioned.recording.one("pulumi:providers:kubernetes").urn
    objects = [item for item in provisioned.recording.registrations if item.type.startswith("kubernetes:")]
    assert objects, "the namespace and the claim at least"
    stray = {item.name: item.provider for item in objects if item.provider != provider}
    assert not stray, "an object without the provider would be created in kubectl's current cluster"


def test_the_namespace_enforces_the_strictest_level_that_the_fabric_allows(provisioned: Provisioned) -> None:
    cluster = provisioned.cluster
    namespaces = provisioned.recording.of_type("kubernetes:core/v1:Namespace")
    labels = {item.inputs["metadata"]["name"]: item.inputs["metadata"]["labels"] for item in namespaces}
    enforced = labels[cluster.namespace]["pod-security.kubernetes.io/enforce"]
    assert enforced == cluster.fabric.pod_security


def test_the_claim_is_in_the_namespace_and_has_the_configured_size(provisioned: Provisioned) -> None:
    cluster = provisioned.cluster
    claims = provisioned.recording.of_type("kubernetes:core/v1:PersistentVolumeClaim")
    found = {item.inputs["metadata"]["name"]: item.inputs for item in claims}
    claim = found[cluster.storage.claim_name]
    assert claim["metadata"]["namespace"] == cluster.namespace
    assert claim["spec"]["resources"]["requests"]["storage"] == f"{cluster.storage.size_gib}Gi"
    assert claim["spec"]["accessModes"] == [cluster.storage.access_mode]
    assert cluster.storage.mount_path.startswith("/")


def test_the_pool_has_the_configured_numbers_of_nodes(provisioned: Provisioned) -> None:
    pool, nodes = provisioned.cluster.gpu, provisioned.settings.gpu.nodes
    assert (pool.num_nodes_min, pool.num_nodes_desired, pool.num_nodes_max) == (nodes.min, nodes.desired, nodes.max)


def test_a_pod_uses_all_gpus_of_its_node(provisioned: Provisioned) -> None:
    pool = provisioned.cluster.gpu
    expected = str(pool.gpus_per_node) if pool.gpus_per_node else None
    assert pool.resource_limits.get("nvidia.com/gpu") == expected
    assert pool.shared_memory_gib > 0, "DataLoader workers and NCCL need more than the 64 MiB default of /dev/shm"


def test_a_gpu_pool_is_labelled_and_its_taint_is_tolerated(provisioned: Provisioned) -> None:
    pool = provisioned.cluster.gpu
    if not pool.gpus_per_node:
        assert not set(GPU_LABEL) & set(pool.node_selector), "a CPU cluster has no such node"
        return
    assert set(GPU_LABEL.items()) <= set(pool.node_selector.items()), "the device plugin's chart selects this label"
    assert GPU_TAINT in pool.tolerations


def test_spot_nodes_are_marked_as_interruptible(provisioned: Provisioned) -> None:
    assert provisioned.cluster.gpu.interruptible == provisioned.settings.interruptible


def test_every_requested_chart_is_in_the_pinned_table(provisioned: Provisioned) -> None:
    cluster = provisioned.cluster
    requested = [request for request in (cluster.gpu.chart, cluster.fabric.chart, *cluster.charts) if request]
    assert {request.key for request in requested} <= set(charts.table())


def test_a_cluster_that_this_project_creates_has_disks_for_prometheus(provisioned: Provisioned) -> None:
    if isinstance(provisioned.settings, ManagedStackSettings):
        assert provisioned.cluster.disk_class, "without a storage class Prometheus loses its series with its node"


def test_the_checkpoints_are_in_the_bucket(provisioned: Provisioned) -> None:
    exports = provisioned.recording.exports
    assert BUCKET_URI.match(exports["bucket_uri"]), exports["bucket_uri"]
    assert exports["checkpoint_uri"].startswith(exports["bucket_uri"].rstrip("/") + "/")


def test_every_output_has_a_value(provisioned: Provisioned) -> None:
    assert provisioned.recording.exports["name"]
    assert provisioned.recording.exports["kubeconfig"]
    assert all(provisioned.recording.exports["annotations"].values())


def test_the_labels_contain_project_stack_owner_and_cost_centre(provisioned: Provisioned) -> None:
    assert provisioned.cluster.labels == provisioned.settings.labels
    assert {"project", "stack", "owner", "cost-centre"} <= set(provisioned.cluster.labels)


def test_a_job_is_created_after_its_cluster_and_destroyed_before_it(provisioned: Provisioned) -> None:
    assert provisioned.cluster.before_workloads, "the claim and the namespace at least"


def test_every_resource_belongs_to_a_component_of_this_project(provisioned: Provisioned) -> None:
    for item in provisioned.recording.registrations:
        if item.parent_name:
            continue
        assert re.fullmatch(r"torchrec-cloud:[a-z]+:[A-Z]\w+", item.type), f"{item.type} {item.name} has no parent"
        assert not item.custom


def test_every_logical_name_begins_with_the_name_of_its_component(provisioned: Provisioned) -> None:
    names = {item.name for item in provisioned.recording.registrations if not item.name.startswith("contract")}
    assert not names, "the names of two components in one program would collide"
