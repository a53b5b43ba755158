"""Each stack by the real engine, from nothing to nothing, on clouds that are simulated."""

from __future__ import annotations

import json
from collections import Counter

import engine_lifecycle
import pytest
from engine_clouds import CREDENTIALS
from engine_lifecycle import POOLS, Story
from engine_runs import Run
from provider_mocks import recording

#: What a remote component makes by itself, which the golden lists of the tests with mocks cannot know.
_INSIDE = ("eksRole", "eksCluster")

#: What stays after `pulumi destroy` where `storage.on_destroy` is keep: the bucket and what protects it.
_KEPT = {
    "aws": "aws:s3/",
    "azure": ("azure-native:storage:", "azure-native:resources:ResourceGroup"),
    "gcp": "gcp:storage/",
    "local": "nothing",
}


def _went_well(run: Run) -> None:
    assert run.ok, run.output


def _names(run: Run, *ops: str) -> list[str]:
    return sorted({step.name for step in run.of_op(*ops)})


def _created(run: Run) -> Counter[tuple[str, str]]:
    """What a run creates, without the providers that the engine adds by itself."""
    steps = [(step.type, step.name) for step in run.steps if step.op == "create"]
    return Counter(step for step in steps if not (step[0].startswith("pulumi:providers:") and "default" in step[1]))


def test_a_preview_creates_exactly_the_golden_list_and_touches_nothing(life: Story, stack: str) -> None:
    _went_well(life.runs["preview"])
    golden = (recording.ROOT / "tests/infra/golden" / f"{stack}.txt").read_text().splitlines()
    expected = Counter(tuple(line.split("  ")[:2]) for line in golden)
    shown = Counter(
        {
            (kind, name): count
            for (kind, name), count in _created(life.runs["preview"]).items()
            if kind != "pulumi:pulumi:Stack" and ":" not in name and not name.endswith(_INSIDE)
        }
    )
    assert shown == expected, "the engine plans other resources than the golden list"
    assert life.num_after_preview == 0, "a preview made something"


def test_up_makes_everything_that_the_preview_showed(life: Story) -> None:
    _went_well(life.runs["up"])
    made = _created(life.runs["up"])
    unforeseen = made - _created(life.runs["preview"])
    # A kustomization is opened by a cluster's own provider, which a preview cannot ask before there is a cluster.
    inside = Counter({step: count for step, count in made.items() if "-addons-training-operator:" in step[1]})
    assert unforeseen in (Counter(), inside)
    assert not _created(life.runs["preview"]) - made, "the preview showed what was not made"


def test_every_resource_of_the_state_has_a_provider_and_a_parent(life: Story) -> None:
    stray = [
        resource["urn"]
        for resource in life.state_resources
        if resource.get("custom")
        and not str(resource["type"]).startswith("pulumi:providers:")
        and not (resource.get("provider") and resource.get("parent"))
    ]
    assert not stray, "a resource without a parent escapes its component's order"
    kubernetes = {
        str(resource["provider"]).split("::")[-2]
        for resource in life.state_resources
        if resource.get("custom") and str(resource["type"]).startswith("kubernetes:")
    }
    assert len(kubernetes) == 1, f"objects of several clusters: {kubernetes}"
    assert not any(name.startswith("default") for name in kubernetes), "the default provider is kubectl's own cluster"


def test_a_second_up_changes_nothing(life: Story) -> None:
    _went_well(life.runs["again"])
    assert life.runs["again"].changes == []


def test_another_seed_replaces_the_job_and_its_settings_and_nothing_else(life: Story, stack: str) -> None:
    _went_well(life.runs["seed"])
    expected = [f"{stack}-training-config", f"{stack}-training-job"]
    assert _names(life.runs["seed"], *(step.op for step in life.runs["seed"].changes)) == expected
    order = [(verb, name) for verb, _, name in life.logs["seed"]]
    job, config = f"{stack}-training-job", f"{stack}-training-config"
    assert order.index(("delete", job)) < order.index(("create", job)), "two jobs would write one run's checkpoints"
    assert order.index(("create", config)) < order.index(("create", job))
    assert order.index(("delete", job)) < order.index(("delete", config)), "a pod would restart without its settings"


def test_more_nodes_are_an_update_of_the_pool_in_place(life: Story, stack: str) -> None:
    run = life.runs["nodes"]
    _went_well(run)
    replaced = [step for step in run.changes if step.op != "update"]
    assert not replaced, "a larger pool must not take nodes from a running job"
    changed = {step.name for step in run.changes} - {f"{stack}-training-quota"}
    assert changed == ({POOLS[stack][1]} if stack in POOLS else set())


def test_larger_storage_grows_in_place(life: Story, stack: str) -> None:
    run = life.runs["grow"]
    _went_well(run)
    assert {step.op for step in run.changes} == {"update"}, "data on the file system would be gone"
    grown = {step.type.rpartition(":")[2] for step in run.changes}
    own = {"aws": {"LustreFileSystem"}, "azure": {"CapacityPool", "CapacityPoolVolume"}, "gcp": {"Instance"}}
    assert own.get(stack, set()) <= grown


@pytest.mark.parametrize("stack", sorted(engine_lifecycle.REFUSED), indirect=True)
def test_a_size_that_the_service_refuses_leaves_everything_as_it_was(life: Story, stack: str) -> None:
    run = life.runs["refused"]
    assert not run.ok, "the service took a size that it does not take"
    words = {"azure": "PoolSizeTooSmall", "gcp": "INVALID_ARGUMENT"}
    assert words[stack] in run.output
    assert not [step for step in run.changes if step.op not in ("update",)]


def test_a_refresh_finds_no_difference(life: Story) -> None:
    _went_well(life.runs["refresh"])
    assert life.runs["refresh"].changes == []


@pytest.mark.parametrize("stack", ["aws", "azure"], indirect=True)
def test_nodes_that_the_autoscaler_brought_stay(life: Story, stack: str) -> None:
    _went_well(life.runs["refresh-scaled"])
    scaled = life.runs["scaled"]
    _went_well(scaled)
    assert POOLS[stack][1] not in _names(scaled, "update", "replace"), "`up` takes nodes from a running job"


def test_destroy_leaves_nothing_but_what_it_was_told_to_keep(life: Story, stack: str) -> None:
    _went_well(life.runs["destroy"])
    unexpected = [thing for thing in life.left if not thing[0].startswith(_KEPT[stack])]
    assert not unexpected, "these would stay on the bill"
    assert life.state_after_destroy == []
    if stack != "local":
        assert any("bucket" in kind.lower() or "container" in kind.lower() for kind, _ in life.left), (
            "the checkpoints went although they were to be kept"
        )


def test_the_exported_state_holds_no_credential_in_clear(life: Story) -> None:
    _went_well(life.runs["up"])
    planted = ["token-of-the-laptop", "a-token-that-must-not-survive", *CREDENTIALS.values()]
    assert [word for word in planted if word in life.state] == []


def test_the_exported_state_holds_no_kubeconfig_in_clear(life: Story) -> None:
    _went_well(life.runs["up"])
    # pulumi-eks registers its kubeconfig as an output in clear, whatever a program asks for: it names a command that
    # fetches a token and holds none, which the test above shows.
    open_ones = [
        resource["urn"]
        for resource in life.state_resources
        if "current-context" in json.dumps(resource) and resource["type"] != "eks:index:Cluster"
    ]
    assert open_ones == []
