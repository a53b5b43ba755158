"""A run with changed settings: which objects are replaced, and what deleting all objects leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import pytest
from cluster_manifests import Manifest, cpu_node
from cluster_operators import PYTORCHJOB, Operator
from cluster_plane import Plane, wait_for
from cluster_runs import build_objects, gpu_facts
from test_cluster_product import claim
from workload_facts import with_settings

from workloads.facts import Facts

Nodes = Callable[..., list[str]]
TRAINING = "app.kubernetes.io/component=training"
#: Objects that controllers create in every namespace.
AMBIENT = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}
PASSING = {"Event", "PodMetrics"}


@pytest.fixture(params=["job", "pytorchjob"])
def launcher(request: pytest.FixtureRequest, operators: Callable[[Operator], None]) -> str:
    """Return a launcher, with its operator installed."""
    if request.param == "pytorchjob":
        operators(PYTORCHJOB)
    return str(request.param)


@pytest.fixture
def before(plane: Plane, namespace: str, gpu_nodes: Nodes, launcher: str) -> Iterator[Facts]:
    """Start a run on enough nodes; return its facts."""
    gpu_nodes(2)
    gpu_nodes(1, cpu_node)
    found = gpu_facts(plane, namespace, {"launcher": launcher})
    plane.apply([*claim(namespace), *build_objects(found, end="never").values()])
    wait_until_running(plane, namespace, job_name(found))
    yield found
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


def job_name(found: Facts) -> str:
    """Return the name of the job of some facts."""
    return str(build_objects(found)["job"]["metadata"]["name"])


def wait_until_running(plane: Plane, namespace: str, name: str) -> list[Manifest]:
    """Wait until both pods of a job run and no other training pod exists; return the pods."""

    def both() -> list[Manifest]:
        """Return the pods, empty while the condition is false."""
        found = plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")
        own = [pod for pod in found if pod["metadata"]["name"].startswith(f"{name}-")]
        return found if len(found) == len(own) == 2 and all(is_running(pod) for pod in own) else []

    pods: list[Manifest] = wait_for(f"two running pods of {name} only", both)
    return pods


def is_running(pod: Manifest) -> bool:
    """Return whether a pod runs and is not being deleted."""
    return pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]


def key(item: Manifest) -> tuple[str, str, str]:
    """Return the kind, the namespace and the name of an object."""
    metadata = item["metadata"]
    return item["kind"], str(metadata.get("namespace", "")), str(metadata["name"])


def all_objects(plane: Plane, namespace: str) -> dict[tuple[str, str], str]:
    """Return the UID of every object of a namespace, of all kinds that the server has."""
    listed = plane.kubectl("api-resources", "--verbs=list", "--namespaced", "--output=name").stdout.split()
    kinds = ",".join(sorted({name for name in listed if not name.startswith(("events", "metrics"))}))
    items: list[Manifest] = plane.get(kinds, "--namespace", namespace)
    return {
        (item["kind"], item["metadata"]["name"]): item["metadata"]["uid"]
        for item in items
        if (item["kind"], item["metadata"]["name"]) not in AMBIENT and item["kind"] not in PASSING
    }


def replace_in_turn(plane: Plane, before: Mapping[str, Manifest], after: Mapping[str, Manifest]) -> None:
    """Update objects as the engine does: a job is deleted before its successor is created, other objects after it."""
    old = {key(item) for item in before.values()} - {key(item) for item in after.values()}
    jobs = [item for name, item in before.items() if name == "job" and key(item) in old]
    rest = [item for name, item in before.items() if name != "job" and key(item) in old]
    plane.apply([item for name, item in after.items() if name != "job"])
    delete(plane, jobs)
    plane.apply([after["job"]])
    delete(plane, rest)


def delete(plane: Plane, items: list[Manifest]) -> None:
    """Delete objects as the provider does: wait for the deletion of their dependents."""
    if items:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        plane.kubectl("delete", "--filename=-", "--cascade=foreground", "--timeout=120s", input=text)


def test_a_changed_setting_of_the_job_replaces_only_the_job(
    plane: Plane, namespace: str, before: Facts, launcher: str
) -> None:
    old = all_objects(plane, namespace)
    after = gpu_facts(plane, namespace, {"launcher": launcher, "max_restarts": before.job.max_restarts + 1})
    replace_in_turn(plane, build_objects(before, end="never"), build_objects(after, end="never"))
    assert job_name(after) != job_name(before)
    wait_until_running(plane, namespace, job_name(after))
    wait_for("deletion of the old job's objects", lambda: not named(plane, namespace, job_name(before)))
    kept = kept_of(before, old)
    assert kept_of(before, all_objects(plane, namespace)) == kept, "another object was replaced"
    assert ("ConfigMap", config_name(before)) in kept


def test_a_changed_setting_of_the_trainer_replaces_the_job_and_the_config_map(
    plane: Plane, namespace: str, before: Facts, launcher: str
) -> None:
    old = all_objects(plane, namespace)
    config = with_settings(before.config, train={"steps": 123})
    after = gpu_facts(plane, namespace, {"launcher": launcher}, config=config)
    replace_in_turn(plane, build_objects(before, end="never"), build_objects(after, end="never"))
    pods = wait_until_running(plane, namespace, job_name(after))
    assert config_name(after) != config_name(before)
    for pod in pods:
        mounted = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        assert mounted == [config_name(after)]
    assert json.loads(stored(plane, namespace, after)["config.json"])["train"]["steps"] == 123
    wait_for("deletion of the old job's objects", lambda: not named(plane, namespace, job_name(before)))
    now = all_objects(plane, namespace)
    assert ("ConfigMap", config_name(before)) not in now
    kept = {item: uid for item, uid in kept_of(before, old).items() if item != ("ConfigMap", config_name(before))}
    assert {item: now.get(item) for item in kept} == kept, "another object was replaced"


def test_deleting_every_object_leaves_nothing_of_any_kind(plane: Plane, namespace: str, before: Facts) -> None:
    assert len(all_objects(plane, namespace)) > len(build_objects(before)), "controllers create further objects"
    objects = list(build_objects(before, end="never").values())
    delete(plane, [*reversed(objects), claim(namespace)[1]])
    wait_for("empty namespace", lambda: not all_objects(plane, namespace))


def config_name(found: Facts) -> str:
    """Return the name of the config map of some facts."""
    return str(build_objects(found)["config"]["metadata"]["name"])


def stored(plane: Plane, namespace: str, found: Facts) -> dict[str, str]:
    """Return the data of the config map in the cluster."""
    data: dict[str, str] = plane.get("configmap", config_name(found), "--namespace", namespace)["data"]
    return data


def named(plane: Plane, namespace: str, name: str) -> list[tuple[str, str]]:
    """Return the objects whose name starts with a job's."""
    return [item for item in all_objects(plane, namespace) if item[1].startswith(name)]


def kept_of(found: Facts, objects: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Return the objects of a namespace that are in the manifests, without the job."""
    expected = {
        (item["kind"], item["metadata"]["name"]) for name, item in build_objects(found).items() if name != "job"
    }
    return {item: uid for item, uid in objects.items() if item in expected}
