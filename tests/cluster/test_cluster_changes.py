"""What becomes of a run whose settings change, and of everything when it is deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import pytest
from cluster_manifests import Manifest, cpu_node
from cluster_operators import PYTORCHJOB, Operator
from cluster_plane import Plane, wait_for
from cluster_runs import gpu_facts, made
from test_cluster_product import claim
from workload_facts import with_settings

from workloads.facts import Facts

Nodes = Callable[..., list[str]]
TRAINING = "app.kubernetes.io/component=training"
#: What controllers add to a namespace or to each other's objects, not what somebody asked for.
AMBIENT = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}
PASSING = {"Event", "PodMetrics"}


@pytest.fixture(params=["job", "pytorchjob"])
def launcher(request: pytest.FixtureRequest, operators: Callable[[Operator], None]) -> str:
    if request.param == "pytorchjob":
        operators(PYTORCHJOB)
    return str(request.param)


@pytest.fixture
def before(plane: Plane, namespace: str, gpu_nodes: Nodes, launcher: str) -> Iterator[Facts]:
    """Facts of a run that is running: all of its objects applied, on as many nodes as it wants."""
    gpu_nodes(2)
    gpu_nodes(1, cpu_node)
    found = gpu_facts(plane, namespace, {"launcher": launcher})
    plane.apply([*claim(namespace), *made(found, end="never").values()])
    running(plane, namespace, job_name(found))
    yield found
    plane.kubectl("delete", "persistentvolume", namespace, "--ignore-not-found", "--wait=false")


def job_name(found: Facts) -> str:
    return str(made(found)["job"]["metadata"]["name"])


def running(plane: Plane, namespace: str, name: str) -> list[Manifest]:
    """Both pods of one job, running, and no other training pod."""

    def both() -> list[Manifest]:
        found = plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")
        own = [pod for pod in found if pod["metadata"]["name"].startswith(f"{name}-")]
        return found if len(found) == len(own) == 2 and all(is_running(pod) for pod in own) else []

    pods: list[Manifest] = wait_for(f"two running pods of {name} alone", both)
    return pods


def is_running(pod: Manifest) -> bool:
    return pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]


def key(item: Manifest) -> tuple[str, str, str]:
    metadata = item["metadata"]
    return item["kind"], str(metadata.get("namespace", "")), str(metadata["name"])


def everything(plane: Plane, namespace: str) -> dict[tuple[str, str], str]:
    """Every object of a namespace, of every kind that the server knows, with its uid."""
    listed = plane.kubectl("api-resources", "--verbs=list", "--namespaced", "--output=name").stdout.split()
    kinds = ",".join(sorted({name for name in listed if not name.startswith(("events", "metrics"))}))
    items: list[Manifest] = plane.get(kinds, "--namespace", namespace)
    return {
        (item["kind"], item["metadata"]["name"]): item["metadata"]["uid"]
        for item in items
        if (item["kind"], item["metadata"]["name"]) not in AMBIENT and item["kind"] not in PASSING
    }


def replace_in_turn(plane: Plane, before: Mapping[str, Manifest], after: Mapping[str, Manifest]) -> None:
    """What the engine does with the component's objects: a job goes before its successor, all else comes first."""
    old = {key(item) for item in before.values()} - {key(item) for item in after.values()}
    jobs = [item for name, item in before.items() if name == "job" and key(item) in old]
    rest = [item for name, item in before.items() if name != "job" and key(item) in old]
    plane.apply([item for name, item in after.items() if name != "job"])
    delete(plane, jobs)
    plane.apply([after["job"]])
    delete(plane, rest)


def delete(plane: Plane, items: list[Manifest]) -> None:
    """As the provider deletes: it waits for the end of what the object owns."""
    if items:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        plane.kubectl("delete", "--filename=-", "--cascade=foreground", "--timeout=120s", input=text)


def test_a_setting_of_the_job_replaces_the_job_and_nothing_else(
    plane: Plane, namespace: str, before: Facts, launcher: str
) -> None:
    old = everything(plane, namespace)
    after = gpu_facts(plane, namespace, {"launcher": launcher, "max_restarts": before.job.max_restarts + 1})
    replace_in_turn(plane, made(before, end="never"), made(after, end="never"))
    assert job_name(after) != job_name(before)
    running(plane, namespace, job_name(after))
    wait_for("end of what the old job owned", lambda: not named(plane, namespace, job_name(before)))
    kept = kept_of(before, old)
    assert kept_of(before, everything(plane, namespace)) == kept, "another object was made anew"
    assert ("ConfigMap", config_name(before)) in kept


def test_a_setting_of_the_trainer_replaces_the_config_map_too(
    plane: Plane, namespace: str, before: Facts, launcher: str
) -> None:
    old = everything(plane, namespace)
    config = with_settings(before.config, train={"steps": 123})
    after = gpu_facts(plane, namespace, {"launcher": launcher}, config=config)
    replace_in_turn(plane, made(before, end="never"), made(after, end="never"))
    pods = running(plane, namespace, job_name(after))
    assert config_name(after) != config_name(before)
    for pod in pods:
        mounted = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        assert mounted == [config_name(after)]
    assert json.loads(stored(plane, namespace, after)["config.json"])["train"]["steps"] == 123
    wait_for("end of what the old job owned", lambda: not named(plane, namespace, job_name(before)))
    now = everything(plane, namespace)
    assert ("ConfigMap", config_name(before)) not in now
    kept = {item: uid for item, uid in kept_of(before, old).items() if item != ("ConfigMap", config_name(before))}
    assert {item: now.get(item) for item in kept} == kept, "another object was made anew"


def test_deleting_every_object_leaves_nothing_of_any_kind(plane: Plane, namespace: str, before: Facts) -> None:
    assert len(everything(plane, namespace)) > len(made(before)), "controllers made objects of their own"
    objects = list(made(before, end="never").values())
    delete(plane, [*reversed(objects), claim(namespace)[1]])
    wait_for("empty namespace", lambda: not everything(plane, namespace))


def config_name(found: Facts) -> str:
    return str(made(found)["config"]["metadata"]["name"])


def stored(plane: Plane, namespace: str, found: Facts) -> dict[str, str]:
    data: dict[str, str] = plane.get("configmap", config_name(found), "--namespace", namespace)["data"]
    return data


def named(plane: Plane, namespace: str, name: str) -> list[tuple[str, str]]:
    """The objects whose name begins with a job's."""
    return [item for item in everything(plane, namespace) if item[1].startswith(name)]


def kept_of(found: Facts, objects: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Of a namespace's objects those that the manifests name, without the job."""
    wanted = {(item["kind"], item["metadata"]["name"]) for name, item in made(found).items() if name != "job"}
    return {item: uid for item, uid in objects.items() if item in wanted}
