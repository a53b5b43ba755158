"""What the real operators tell torchrun in the pods of the product's own jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster_operators import JOBSET, PYTORCHJOB, TRAINER, Operator
from cluster_plane import Plane, wait_for
from test_cluster_operators import environment
from test_cluster_product import STACKS, golden, template
from workload_facts import operators_variables

from workloads.cli.snapshot import index_of

TRAINING = "app.kubernetes.io/component=training"
OPERATORS = {"pytorchjob": (PYTORCHJOB,), "trainjob": (JOBSET, TRAINER)}
CONTAINERS = {"pytorchjob": "pytorch", "trainjob": "node"}


def started(plane: Plane, namespace: str, stack: str, launcher: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The objects of a golden file, and the pods of its job once they are all made; they need not run."""
    companions, launched = golden(stack, namespace), golden(f"{stack}-{launcher}", namespace)
    plane.apply([companions["account"], companions["config"], *(launched[key] for key in launched if key != "job")])
    plane.apply([launched["job"]])
    spec = launched["job"]["spec"]
    wanted = (
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] if launcher == "pytorchjob" else spec["trainer"]["numNodes"]
    )
    pods = lambda: plane.get("pods", "--namespace", namespace, f"--selector={TRAINING}")  # noqa: E731
    return launched, wait_for(f"{wanted} pods", lambda: len(found := pods()) == wanted and found)


@pytest.mark.parametrize("stack", STACKS)
def test_the_training_operator_tells_the_pods_of_each_stack_where_and_how_many_they_are(
    plane: Plane,
    open_namespace: str,
    operators: Callable[[Operator], None],
    stack: str,
) -> None:
    operators(PYTORCHJOB)
    launched, pods = started(plane, open_namespace, stack, "pytorchjob")
    job = launched["job"]
    policy, name = job["spec"]["elasticPolicy"], job["metadata"]["name"]
    for pod in pods:
        given = environment(pod, "pytorch")
        assert given["PET_NNODES"] == f"{policy['minReplicas']}:{policy['maxReplicas']}"
        assert given["PET_NPROC_PER_NODE"] == job["spec"]["nprocPerNode"]
        assert given["PET_MAX_RESTARTS"] == str(policy["maxRestarts"])
        assert given["PET_RDZV_BACKEND"] == "c10d"
        assert given["PET_RDZV_ENDPOINT"] == f"{name}-worker-0:23456"
        own = {each["name"]: each["value"] for each in template(job)["spec"]["containers"][0]["env"]}
        assert own.items() <= given.items(), "the operator changed what the product set"
    service = wait_for("service of the endpoint", lambda: service_of(plane, open_namespace, f"{name}-worker-0"))
    assert 23456 in [port["port"] for port in service["spec"]["ports"]]


def service_of(plane: Plane, namespace: str, name: str) -> dict[str, Any] | None:
    return next(
        (each for each in plane.get("services", "--namespace", namespace) if each["metadata"]["name"] == name), None
    )


@pytest.mark.parametrize("launcher", OPERATORS)
def test_an_operator_sets_the_variables_with_which_the_trainers_own_test_starts_it(
    plane: Plane,
    open_namespace: str,
    operators: Callable[[Operator], None],
    launcher: str,
) -> None:
    """`tests/workloads/test_workloads_starts.py` trains with these; hosts and ports are this machine's there."""
    for operator in OPERATORS[launcher]:
        operators(operator)
    launched, pods = started(plane, open_namespace, "local", launcher)
    container = CONTAINERS[launcher]
    for pod in pods:
        index = index_of(pod)
        assert index is not None
        given = added(pod, container, launched)
        assumed = operators_variables(launcher, index, port=1)
        assert given.keys() == assumed.keys()
        assert without_addresses(given) == without_addresses(assumed)


def added(pod: dict[str, Any], container: str, launched: dict[str, Any]) -> dict[str, str]:
    """The variables of a container that the product did not set itself."""
    holder = launched.get("job-trainingruntime", launched["job"])
    own = {each["name"] for each in container_named(holder, container)["env"]}
    (found,) = (each for each in pod["spec"]["containers"] if each["name"] == container)
    # A value from a field of the pod is its index.
    index = str(index_of(pod))
    return {each["name"]: each.get("value", index) for each in found["env"] if each["name"] not in own}


def container_named(item: Any, name: str) -> dict[str, Any]:
    """The container of a name, wherever it is in a manifest."""
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
    return {key: value for key, value in variables.items() if not key.endswith(("_ADDR", "_PORT", "_ENDPOINT"))}
