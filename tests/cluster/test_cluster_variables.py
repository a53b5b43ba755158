"""The variables that the real operators set for torchrun in the pods of the product's jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster_operators import JOBSET, PYTORCHJOB, TRAINER, Operator
from cluster_plane import Plane, wait_for
from test_cluster_operators import environment
from test_cluster_product import STACKS, golden, template
from workload_facts import operators_variables

from workloads.runs.pods import pod_index

TRAINING = "app.kubernetes.io/component=training"
OPERATORS = {"pytorchjob": (PYTORCHJOB,), "trainjob": (JOBSET, TRAINER)}
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node"}


def start_job(plane: Plane, namespace: str, stack: str, launcher: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Create the objects of a golden file; return them and the job's pods once all exist, running or not."""
    companions, launched = golden(stack, namespace), golden(f"{stack}-{launcher}", namespace)
    plane.apply([companions["account"], companions["config"], *(launched[key] for key in launched if key != "job")])
    plane.apply([launched["job"]])
    spec = launched["job"]["spec"]
    num_pods = (
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] if launcher == "pytorchjob" else spec["trainer"]["numNodes"]
    )
    pods = lambda: plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")  # noqa: E731
    return launched, wait_for(f"{num_pods} pods", lambda: len(found := pods()) == num_pods and found)


@pytest.mark.parametrize("stack", STACKS)
def test_the_training_operator_sets_the_rendezvous_of_each_stacks_pods(
    plane: Plane,
    open_namespace: str,
    operators: Callable[[Operator], None],
    stack: str,
) -> None:
    operators(PYTORCHJOB)
    launched, pods = start_job(plane, open_namespace, stack, "pytorchjob")
    job = launched["job"]
    policy, name = job["spec"]["elasticPolicy"], job["metadata"]["name"]
    for pod in pods:
        env = environment(pod, "pytorch")
        assert env["PET_NNODES"] == f"{policy['minReplicas']}:{policy['maxReplicas']}"
        assert env["PET_NPROC_PER_NODE"] == job["spec"]["nprocPerNode"]
        assert env["PET_MAX_RESTARTS"] == str(policy["maxRestarts"])
        assert env["PET_RDZV_BACKEND"] == "c10d"
        assert env["PET_RDZV_ENDPOINT"] == f"{name}-worker-0:23456"
        own = {each["name"]: each["value"] for each in template(job)["spec"]["containers"][0]["env"]}
        assert own.items() <= env.items(), "the operator changed what the product set"
    service = wait_for("service of the endpoint", lambda: service_of(plane, open_namespace, f"{name}-worker-0"))
    assert 23456 in [port["port"] for port in service["spec"]["ports"]]


def service_of(plane: Plane, namespace: str, name: str) -> dict[str, Any] | None:
    """Return a service, None if it does not exist."""
    return next(
        (each for each in plane.get("services", "--namespace", namespace) if each["metadata"]["name"] == name), None
    )


@pytest.mark.parametrize("launcher", OPERATORS)
def test_an_operator_sets_the_variables_that_the_trainers_own_test_assumes(
    plane: Plane,
    open_namespace: str,
    operators: Callable[[Operator], None],
    launcher: str,
) -> None:
    """`tests/workloads/test_workloads_starts.py` trains with them, with hosts and ports of one machine."""
    for operator in OPERATORS[launcher]:
        operators(operator)
    launched, pods = start_job(plane, open_namespace, "local", launcher)
    container = CONTAINERS[launcher]
    for pod in pods:
        index = pod_index(pod)
        assert index is not None
        given = operator_variables(pod, container, launched)
        assumed = operators_variables(launcher, index, port=1)
        assert given.keys() == assumed.keys()
        assert without_addresses(given) == without_addresses(assumed)


def operator_variables(pod: dict[str, Any], container: str, launched: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container that the product did not set."""
    holder = launched.get("job-trainingruntime", launched["job"])
    own = {each["name"] for each in container_named(holder, container)["env"]}
    (found,) = (each for each in pod["spec"]["containers"] if each["name"] == container)
    # The only value from a field of the pod is its index.
    index = str(pod_index(pod))
    return {each["name"]: each.get("value", index) for each in found["env"] if each["name"] not in own}


def container_named(item: Any, name: str) -> dict[str, Any]:
    """Return the container of a name anywhere in a manifest."""
    if isinstance(item, dict):
        for each in item.get("containers", []):
            if each["name"] == name:
                found: dict[str, Any] = each
                return found
    for part in item.values() if isinstance(item, dict) else item if isinstance(item, list) else ():
        if found := container_named(part, name):
            return found
    return {}


def without_addresses(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables without addresses and ports."""
    return {key: value for key, value in variables.items() if not key.endswith(("_ADDR", "_PORT", "_ENDPOINT"))}
