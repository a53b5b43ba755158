"""The whole lifecycle of each stack, with the real engine and simulated clouds."""

from __future__ import annotations

import json
from collections import Counter

import engine_lifecycle
import pytest
import simulated_gke
from engine_clouds import CREDENTIALS
from engine_lifecycle import POOLS, Lifecycle
from engine_runs import Run
from provider_mocks import recording

#: Resources that a remote component creates itself; the golden lists of the mocked tests lack them.
_INSIDE = ("eksRole", "eksCluster")

#: What remains after `pulumi destroy` if `storage.on_destroy` is keep: the bucket and what protects it.
_KEPT = {
    "aws": "aws:s3/",
    "azure": ("azure-native:storage:", "azure-native:resources:ResourceGroup"),
    "gcp": "gcp:storage/",
    "local": "nothing",
}


def _assert_ok(run: Run) -> None:
    assert run.ok, run.output


def _names(run: Run, *ops: str) -> list[str]:
    return sorted({step.name for step in run.of_op(*ops)})


def _created(run: Run) -> Counter[tuple[str, str]]:
    """Count what a run creates, without default providers."""
    steps = [(step.type, step.name) for step in run.steps if step.op == "create"]
    return Counter(step for step in steps if not (step[0].startswith("pulumi:providers:") and "default" in step[1]))


def test_a_preview_plans_exactly_the_golden_list_and_creates_nothing(lifecycle: Lifecycle, stack: str) -> None:
    _assert_ok(lifecycle.runs["preview"])
    golden = (recording.ROOT / "tests/infra/golden" / f"{stack}.txt").read_text().splitlines()
    expected = Counter(tuple(line.split("  ")[:2]) for line in golden)
    shown = Counter(
        {
            (kind, name): count
            for (kind, name), count in _created(lifecycle.runs["preview"]).items()
            if kind != "pulumi:pulumi:Stack" and ":" not in name and not name.endswith(_INSIDE)
        }
    )
    assert shown == expected, "the planned resources differ from the golden list"
    assert lifecycle.num_after_preview == 0, "a preview created a resource"


def test_up_creates_everything_that_the_preview_showed(lifecycle: Lifecycle) -> None:
    _assert_ok(lifecycle.runs["up"])
    created = _created(lifecycle.runs["up"])
    unplanned = created - _created(lifecycle.runs["preview"])
    # The cluster's provider expands a kustomization, so a preview without a cluster cannot show it.
    inside = Counter({step: count for step, count in created.items() if "-addons-training-operator:" in step[1]})
    assert unplanned in (Counter(), inside)
    assert not _created(lifecycle.runs["preview"]) - created, "the preview showed a resource that was not created"


def test_every_resource_of_the_state_has_a_provider_and_a_parent(lifecycle: Lifecycle) -> None:
    detached = [
        resource["urn"]
        for resource in lifecycle.state_resources
        if resource.get("custom")
        and not str(resource["type"]).startswith("pulumi:providers:")
        and not (resource.get("provider") and resource.get("parent"))
    ]
    assert not detached, "a resource without a parent ignores the order of its component"
    kubernetes = {
        str(resource["provider"]).split("::")[-2]
        for resource in lifecycle.state_resources
        if resource.get("custom") and str(resource["type"]).startswith("kubernetes:")
    }
    assert len(kubernetes) == 1, f"objects of several clusters: {kubernetes}"
    assert not any(name.startswith("default") for name in kubernetes), (
        "the default provider uses the current kubectl context"
    )


def test_a_second_up_changes_nothing(lifecycle: Lifecycle, stack: str) -> None:
    _assert_ok(lifecycle.runs["again"])
    # The autoscaler has started the nodes of the run, and AKS requires their number in every request.
    expected = [("update", POOLS[stack][1])] if stack == "azure" else []
    assert [(step.op, step.name) for step in lifecycle.runs["again"].changes] == expected
    assert lifecycle.nodes["again"] == lifecycle.nodes["pending"], "`up` would move nodes of a running job"


def test_another_seed_replaces_the_job_and_its_settings_and_nothing_else(lifecycle: Lifecycle, stack: str) -> None:
    _assert_ok(lifecycle.runs["seed"])
    changed = {step.name for step in lifecycle.runs["seed"].changes}
    # The autoscaler has taken the idle nodes back, and AKS requires their number in every request.
    updated = {step.name for step in lifecycle.runs["seed"].of_op("update")} & {"azure-gpu"}
    assert changed - updated == {f"{stack}-training-config", f"{stack}-training-job"}
    order = [(verb, name) for verb, _, name in lifecycle.logs["seed"]]
    job, config = f"{stack}-training-job", f"{stack}-training-config"
    assert order.index(("delete", job)) < order.index(("create", job)), (
        "two jobs would write the checkpoints of one run"
    )
    assert order.index(("create", config)) < order.index(("create", job))
    assert order.index(("delete", job)) < order.index(("delete", config)), "a pod would restart without its settings"


def test_a_changed_environment_measures_the_fabric_again_on_the_nodes_of_the_training(
    lifecycle: Lifecycle, stack: str
) -> None:
    if stack not in ("aws", "azure"):
        assert "environment" not in lifecycle.runs, "only RDMA is measured by default"
        return
    _assert_ok(lifecycle.runs["environment"])
    order = [(verb, name) for verb, _, name in lifecycle.logs["environment"]]
    job, netcheck = f"{stack}-training-job", f"{stack}-training-netcheck"
    replaced = [(verb, name) for verb, name in order if name in (job, netcheck)]
    assert replaced == [("delete", job), ("delete", netcheck), ("create", netcheck), ("create", job)]


def test_more_nodes_update_the_pool_in_place(lifecycle: Lifecycle, stack: str) -> None:
    run = lifecycle.runs["nodes"]
    _assert_ok(run)
    replaced = [step for step in run.changes if step.op != "update"]
    assert not replaced, "a larger pool must not take nodes from a running job"
    changed = {step.name for step in run.changes} - {f"{stack}-training-quota"}
    assert changed == ({POOLS[stack][1]} if stack in POOLS else set())


def test_larger_storage_grows_in_place(lifecycle: Lifecycle, stack: str) -> None:
    run = lifecycle.runs["grow"]
    _assert_ok(run)
    assert {step.op for step in run.changes} == {"update"}, "the data on the file system would be lost"
    grown = {step.type.rpartition(":")[2] for step in run.changes}
    own = {"aws": {"LustreFileSystem"}, "azure": {"CapacityPool", "CapacityPoolVolume"}, "gcp": {"Instance"}}
    assert own.get(stack, set()) <= grown


@pytest.mark.parametrize("stack", sorted(engine_lifecycle.REFUSED_GIB), indirect=True)
def test_a_refused_storage_size_changes_nothing_else(lifecycle: Lifecycle, stack: str) -> None:
    run = lifecycle.runs["refused"]
    assert not run.ok, "the service accepted a size that it must refuse"
    errors = {"azure": "PoolSizeTooSmall", "gcp": "INVALID_ARGUMENT"}
    assert errors[stack] in run.output
    assert not [step for step in run.changes if step.op not in ("update",)]


def test_a_refresh_finds_no_difference_but_the_number_of_nodes(lifecycle: Lifecycle, stack: str) -> None:
    _assert_ok(lifecycle.runs["refresh"])
    autoscaled = {POOLS[stack][1]} if stack in POOLS else set()
    assert {step.name for step in lifecycle.runs["refresh"].changes} <= autoscaled


@pytest.mark.parametrize("stack", list(POOLS), indirect=True)
def test_up_keeps_nodes_that_the_autoscaler_added(lifecycle: Lifecycle, stack: str) -> None:
    _assert_ok(lifecycle.runs["refresh-scaled"])
    scaled = lifecycle.runs["scaled"]
    _assert_ok(scaled)
    assert POOLS[stack][1] not in _names(scaled, "replace")
    assert lifecycle.num_nodes_after_scaling == 4, "`up` would remove nodes from a running job"


@pytest.mark.parametrize("stack", ["gcp"], indirect=True)
def test_no_gpu_node_waits_idle_for_the_job(lifecycle: Lifecycle) -> None:
    assert not simulated_gke.moments(lifecycle.world, "idle"), "nodes cost money while storage and operators start"


@pytest.mark.parametrize("stack", ["gcp"], indirect=True)
def test_gke_upgrades_nodes_only_in_the_maintenance_window_and_up_accepts_their_version(lifecycle: Lifecycle) -> None:
    upgrades = simulated_gke.moments(lifecycle.world, "interrupt")
    assert upgrades, "the window never opened"
    assert {f"{moment:%A %H}" for moment in upgrades} == {"Saturday 02"}
    # An upgrade changes the pool's version; the program must neither downgrade nor replace the pool.
    assert not [step for step in lifecycle.runs["scaled"].changes if "container" in step.type]


def test_destroy_leaves_only_what_the_settings_keep(lifecycle: Lifecycle, stack: str) -> None:
    _assert_ok(lifecycle.runs["destroy"])
    # EKS itself creates the log group of a deleted cluster again; `destroy` ends by naming it (infra/orphans).
    left = [resource for resource in lifecycle.left if not resource[1].startswith("/aws/eks/")]
    unexpected = [resource for resource in left if not resource[0].startswith(_KEPT[stack])]
    assert not unexpected, "these resources would still cost money"
    assert lifecycle.state_after_destroy == []
    if stack != "local":
        assert any("bucket" in kind.lower() or "container" in kind.lower() for kind, _ in lifecycle.left), (
            "the checkpoints were deleted although on_destroy is keep"
        )


def test_the_exported_state_contains_no_credential_in_plain_text(lifecycle: Lifecycle) -> None:
    _assert_ok(lifecycle.runs["up"])
    planted = ["token-of-the-laptop", "a-token-that-must-not-survive", "acr-refresh-", *CREDENTIALS.values()]
    assert [word for word in planted if word in lifecycle.state] == []


def test_the_exported_state_contains_no_kubeconfig_in_plain_text(lifecycle: Lifecycle) -> None:
    _assert_ok(lifecycle.runs["up"])
    # pulumi-eks always exports its kubeconfig in plain text. It contains a command that fetches a token, and no token
    # itself: see the test above.
    exposed = [
        resource["urn"]
        for resource in lifecycle.state_resources
        if "current-context" in json.dumps(resource) and resource["type"] != "eks:index:Cluster"
    ]
    assert exposed == []
