"""Jobs on a real control plane: scheduling, waiting, ending and deletion of their pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster_manifests import indexed_job, pod_template
from cluster_plane import Plane, wait_for

Nodes = Callable[..., list[str]]


def pods(plane: Plane, namespace: str) -> list[dict[str, Any]]:
    """Return the pods of a namespace."""
    found: list[dict[str, Any]] = plane.get("pods", "--namespace", namespace)
    return found


def condition(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of a type, empty if there is none."""
    return next((each for each in item.get("status", {}).get("conditions", []) if each["type"] == kind), {})


def waiting(plane: Plane, namespace: str) -> list[str]:
    """Return the scheduler's message for each pod that it cannot place."""
    conditions = [condition(pod, "PodScheduled") for pod in pods(plane, namespace)]
    return [each.get("message", "") for each in conditions if each.get("reason") == "Unschedulable"]


def bound(plane: Plane, namespace: str) -> dict[str, str]:
    """Return the node of each placed pod, by the pod's host name."""
    specs = [pod["spec"] for pod in pods(plane, namespace)]
    return {spec["hostname"]: spec["nodeName"] for spec in specs if "nodeName" in spec}


def test_an_indexed_job_runs_one_pod_on_each_gpu_node_with_its_index_in_the_host_name(
    plane: Plane, namespace: str, gpu_nodes: Nodes
) -> None:
    nodes = gpu_nodes(3)
    plane.apply(indexed_job(namespace, 3, end="never"))
    placed = wait_for("three placed pods", lambda: len(found := bound(plane, namespace)) == 3 and found)
    assert sorted(placed) == ["train-0", "train-1", "train-2"], "the rendezvous uses this name of pod 0"
    assert sorted(placed.values()) == nodes, "eight GPUs each: no two pods fit on one node"


def test_the_headless_service_has_an_endpoint_for_every_host_name(
    plane: Plane, namespace: str, gpu_nodes: Nodes
) -> None:
    gpu_nodes(2)
    plane.apply(indexed_job(namespace, 2, end="never"))

    def complete() -> bool:
        """Return whether the service has both endpoints."""
        slices = plane.get("endpointslices", "--namespace", namespace)
        names = {each.get("hostname") for item in slices for each in item.get("endpoints") or []}
        return names == {"train-0", "train-1"}

    wait_for("endpoints train-0 and train-1", complete)


def test_a_job_whose_pods_succeed_is_complete(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(2)
    plane.apply(indexed_job(namespace, 2))
    job = wait_for("completed job", lambda: done(plane, namespace, "Complete"))
    assert job["status"]["succeeded"] == 2


def test_a_job_fails_at_once_on_the_exit_code_of_a_user_error(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(2)
    plane.apply(indexed_job(namespace, 2, end="Failed", **{"exit-code": "2"}))
    job = wait_for("failed job", lambda: done(plane, namespace, "Failed"))
    assert condition(job, "Failed")["reason"] == "PodFailurePolicy", "retrying a user error wastes the cluster"


def done(plane: Plane, namespace: str, kind: str) -> dict[str, Any] | None:
    """Return the job if it has a condition, else None."""
    job: dict[str, Any] = plane.get("job", "train", "--namespace", namespace)
    return job if condition(job, kind).get("status") == "True" else None


def test_a_failed_pod_is_replaced(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(1)
    plane.apply(indexed_job(namespace, 1, end="Failed", **{"exit-code": "1"}))
    first = wait_for("first pod", lambda: [pod["metadata"]["uid"] for pod in pods(plane, namespace)])
    later = lambda: {pod["metadata"]["uid"] for pod in pods(plane, namespace)} - set(first)  # noqa: E731
    wait_for("replacement", later)
    assert not condition(plane.get("job", "train", "--namespace", namespace), "Failed")


def test_a_pod_without_a_free_gpu_node_waits_for_gpus(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(2)
    plane.apply(indexed_job(namespace, 3, end="never"))
    (message,) = wait_for("one waiting pod", lambda: len(found := waiting(plane, namespace)) == 1 and found)
    assert "2 Insufficient nvidia.com/gpu" in message


def test_a_waiting_pod_runs_on_a_new_node(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(1)
    plane.apply(indexed_job(namespace, 2, end="never"))
    wait_for("one waiting pod", lambda: len(waiting(plane, namespace)) == 1)
    gpu_nodes(1)
    wait_for("two placed pods", lambda: len(bound(plane, namespace)) == 2)


def test_a_pod_without_the_toleration_waits(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(1)
    service, job = indexed_job(namespace, 1)
    del job["spec"]["template"]["spec"]["tolerations"]
    plane.apply([service, job])
    (message,) = wait_for("waiting pod", lambda: waiting(plane, namespace))
    assert "untolerated taint" in message


def test_an_unknown_field_is_refused_with_its_name(plane: Plane, namespace: str) -> None:
    _service, job = indexed_job(namespace, 1)
    job["spec"]["template"]["spec"]["tolerance"] = []
    # The server and kubectl, which also checks known kinds, word it differently.
    message = plane.rejection(job)
    assert "spec.template.spec" in message
    assert "tolerance" in message


def test_a_value_that_is_not_allowed_is_refused(plane: Plane, namespace: str) -> None:
    _service, job = indexed_job(namespace, 1)
    job["spec"]["completionMode"] = "Ordered"
    assert 'spec.completionMode: Unsupported value: "Ordered"' in plane.rejection(job)


def test_a_jobs_template_cannot_be_changed_in_place(plane: Plane, namespace: str) -> None:
    _service, job = indexed_job(namespace, 1)
    plane.apply([job])
    job["spec"]["template"]["spec"]["containers"][0]["image"] = "trainer:other"
    assert "field is immutable" in plane.rejection(job), (
        "therefore the product includes a hash of the specification in the name"
    )


def test_a_pod_that_violates_the_restricted_level_is_refused(plane: Plane, namespace: str) -> None:
    template = pod_template()
    template["spec"]["hostNetwork"] = True
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bad", "namespace": namespace}, **spec_of(template)}
    message = plane.rejection(pod)
    assert 'violates PodSecurity "restricted:latest"' in message
    assert "hostNetwork=true" in message


def spec_of(template: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a pod template."""
    return {"spec": template["spec"]}


def test_a_quota_of_gpus_limits_the_number_of_pods(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(2)
    quota = {"hard": {"requests.nvidia.com/gpu": "8"}}
    meta = {"name": "gpus", "namespace": namespace}
    plane.apply([{"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": quota}])
    plane.apply(indexed_job(namespace, 2, end="never"))
    events = lambda: [  # noqa: E731
        event["message"]
        for event in plane.get("events", "--namespace", namespace)
        if event["reason"] == "FailedCreate" and "exceeded quota: gpus" in event["message"]
    ]
    wait_for("refusal by the quota", events)
    assert len(pods(plane, namespace)) == 1


def test_deleting_a_job_deletes_its_pods(plane: Plane, namespace: str, gpu_nodes: Nodes) -> None:
    gpu_nodes(2)
    plane.apply(indexed_job(namespace, 2, end="never"))
    wait_for("two placed pods", lambda: len(bound(plane, namespace)) == 2)
    plane.kubectl("delete", "job/train", "service/train", "--namespace", namespace)
    wait_for("empty namespace", lambda: pods(plane, namespace) == [])
    assert plane.get("jobs,services,endpointslices", "--namespace", namespace) == []
