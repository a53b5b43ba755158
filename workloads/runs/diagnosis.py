"""Explanations of why a pod waits or how it ended, as pure functions of the API server's objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from infra.kube_api import Object
from infra.text import one_line
from trainer.exit_codes import EXIT_TERMINATED, EXIT_USER_ERROR

GPU = "nvidia.com/gpu"
#: One cause in a scheduler message: `2 Insufficient cpu`. Commas inside braces belong to a taint.
_CAUSE = re.compile(r"(\d+) ((?:[^,.{]|\{[^}]*\}|\.(?! |$))+)")
_EXIT_KILLED = 137  # 128 + SIGKILL


@dataclass(frozen=True)
class NodeCapacity:
    """The allocatable resources of each node, None if these credentials may not list nodes."""

    nodes: Sequence[Mapping[str, str]] | None
    num_pods: int


def explain_pod(pod: Object, events: Sequence[Object], capacity: NodeCapacity) -> str | None:
    """Return one sentence on what is wrong with a pod, None if nothing is."""
    return _explain_end(pod) or _explain_unscheduled(pod, events, capacity) or _explain_waiting(pod, events)


# --- not scheduled ---------------------------------------------------------------------------------------------------


def _explain_unscheduled(pod: Object, events: Sequence[Object], capacity: NodeCapacity) -> str | None:
    """Return why the scheduler has not assigned a pod to a node, None if it has."""
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition.get("status") == "True":
        return None
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates", ()))
        return f"held back by {gates or 'a scheduling gate'}: not admitted yet"
    message = str(condition.get("message") or "")
    causes = [_explain_cause(int(count), what.strip(), pod, capacity) for count, what in parse_causes(message)]
    text = "; ".join(dict.fromkeys(filter(None, causes))) or one_line(message) or "the scheduler has not processed it"
    return text + _explain_autoscaler(events)


def parse_causes(message: str) -> list[tuple[str, str]]:
    """Return count and cause of each part of `0/3 nodes are available: 1 Insufficient x, 2 node(s) had ...`.

    A sentence without counts, such as one on an unbound claim, is one cause with count 0.
    """
    _, colon, listed = message.partition("nodes are available:")
    listed = (listed if colon else message).split(" preemption:")[0]
    sentence = listed.strip().partition(". ")[0].strip(" .")
    return _CAUSE.findall(listed) or ([("0", sentence)] if sentence else [])


def _explain_cause(count: int, what: str, pod: Object, capacity: NodeCapacity) -> str:
    """Return one cause of a scheduler message with the details that the user needs to fix it."""
    nodes = f"{count} {'node' if count == 1 else 'nodes'}"
    if what.startswith("Insufficient "):
        return _explain_insufficient(what.removeprefix("Insufficient "), nodes, pod, capacity)
    if "untolerated taint" in what:
        taint = what.partition("{")[2].rstrip("}").replace(": ", "=", 1).rstrip("=")
        return f"{nodes}: taint {taint}, which the job does not tolerate"
    if "anti-affinity" in what:
        return f"{nodes}: used by another training pod, and each training pod needs a whole node"
    if "node affinity" in what or "selector" in what:
        labels = ", ".join(f"{key}={value}" for key, value in (pod["spec"].get("nodeSelector") or {}).items())
        return f"{nodes}: without the labels that the pod selects ({labels or 'node affinity'})"
    if "ersistentvolumeclaim" in what.lower():
        claims = ", ".join(claim_names(pod)) or "a claim"
        return f"unbound claim {claims}: {what[:1].lower()}{what[1:]}"
    if what.startswith("no nodes"):
        return "the cluster has no nodes"
    return f"{nodes}: {what.removeprefix('node(s) ')}"


def _explain_insufficient(resource: str, nodes: str, pod: Object, capacity: NodeCapacity) -> str:
    """Return whether too few nodes have a resource, or other pods use it."""
    amount = requested_amount(pod, resource)
    base = f"Insufficient {resource}: "
    if capacity.nodes is None or amount is None:
        return f"{base}{nodes} with too little of it free" + (f", the pod requests {amount}" if amount else "")
    fitting = sum(parse_quantity(node.get(resource, "0")) >= parse_quantity(amount) for node in capacity.nodes)
    what = "GPUs" if resource == GPU else resource
    if fitting < capacity.num_pods:
        have = f"{fitting} {'node has' if fitting == 1 else 'nodes have'} {amount} {what}"
        needed = f"{capacity.num_pods} {'is' if capacity.num_pods == 1 else 'are'} needed"
        return f"{base}{have}, {needed}"
    return f"{base}{fitting} nodes have {amount} {what}, but other pods use them"


def requested_amount(pod: Object, resource: str) -> str | None:
    """Return how much of a resource a pod requests, as written in its requests or limits; None if it requests none."""
    for container in pod["spec"].get("containers", ()):
        resources = container.get("resources") or {}
        found = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        if found:
            return str(found)
    return None


def parse_quantity(text: str) -> float:
    """Return a Kubernetes quantity (`8`, `500m`, `1152Gi`) as a number."""
    digits = text.rstrip("KMGTPEikmu")
    unit = text[len(digits) :]
    if unit == "m":
        return float(digits) / 1000
    power = " KMGTPE".index(unit[:1].upper()) if unit else 0
    return float(digits) * float(1024 if unit.endswith("i") else 1000) ** power


def claim_names(pod: Object) -> list[str]:
    """Return the names of the claims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or ()
    return [item["persistentVolumeClaim"]["claimName"] for item in volumes if "persistentVolumeClaim" in item]


def _explain_autoscaler(events: Sequence[Object]) -> str:
    """Return what the autoscaler does about an unscheduled pod, empty if it reported nothing."""
    for event in reversed(events):
        if event.get("reason") == "TriggeredScaleUp":
            return "; the autoscaler is adding nodes"
        if event.get("reason") == "NotTriggerScaleUp":
            return f"; the autoscaler adds no node: {one_line(event.get('message'), 160)}"
    return ""


# --- scheduled, not running ------------------------------------------------------------------------------------------


def _explain_waiting(pod: Object, events: Sequence[Object]) -> str | None:
    """Return why a container of a scheduled pod does not run, None if all run."""
    for status in _statuses(pod):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting:
            found = _explain_container(status, waiting, pod, events)
            if found:
                return found
    return None


def _explain_container(status: Object, waiting: Object, pod: Object, events: Sequence[Object]) -> str | None:
    """Return why one container waits, None if it is only being created."""
    reason, message = str(waiting.get("reason") or ""), one_line(waiting.get("message") or "")
    if reason in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"):
        cause = message if reason != "ImagePullBackOff" else _last_message(events, "Failed") or message
        return f"{reason}: image {_image(pod, status)} cannot be pulled: {cause or 'the registry gave no reason'}"
    if reason == "CrashLoopBackOff":
        last = (status.get("lastState") or {}).get("terminated")
        return f"CrashLoopBackOff: {explain_exit(last, pod, str(status['name'])) if last else message}"
    if reason in ("ContainerCreating", "PodInitializing", ""):
        mount = _last_message(events, "FailedMount") or _last_message(events, "FailedAttachVolume")
        sandbox = _last_message(events, "FailedCreatePodSandBox")
        return f"volume: {mount}" if mount else f"network: {sandbox}" if sandbox else None
    return f"{reason}: {message}" if message else reason


def _image(pod: Object, status: Object) -> str:
    """Return the image of the container that a status describes."""
    spec = pod["spec"]
    containers = [*spec.get("containers", ()), *spec.get("initContainers", ())]
    return str(next((item["image"] for item in containers if item["name"] == status["name"]), status.get("image")))


def _last_message(events: Sequence[Object], reason: str) -> str | None:
    """Return the message of the newest event with a reason."""
    for event in reversed(events):
        if event.get("reason") == reason:
            return one_line(event.get("message"))
    return None


# --- ended -----------------------------------------------------------------------------------------------------------


def _explain_end(pod: Object) -> str | None:
    """Return how a pod ended or is being disrupted, None if it runs or succeeded."""
    status = pod.get("status") or {}
    if status.get("phase") == "Succeeded":
        return None
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted is not None and disrupted.get("status") == "True":
        message = one_line(disrupted.get("message") or "")
        return f"{disrupted.get('reason') or 'disrupted'}: {message or 'its node was removed'}"
    for item in _statuses(pod):
        ended = (item.get("state") or {}).get("terminated")
        if ended and ended.get("exitCode"):
            return explain_exit(ended, pod, str(item["name"]))
    if status.get("phase") == "Failed":
        return f"{status.get('reason') or 'Failed'}: {one_line(status.get('message') or 'no message')}"
    return None


def explain_exit(ended: Object, pod: Object, container: str) -> str:
    """Return the meaning of a container's exit code, and the last line that it wrote."""
    code, last = int(ended.get("exitCode") or 0), last_line(str(ended.get("message") or ""))
    if ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, container)
        more = f" over its limit of {limit}" if limit else ": the node had no memory left"
        return f"OOMKilled: {container} used memory{more}. Fix: raise job.memory_gib, or lower the batch size"
    if code == EXIT_USER_ERROR:
        return f"exit code {code}, a mistake in the settings: {last or 'see `python -m workloads logs`'}"
    names = {_EXIT_KILLED: "killed (SIGKILL)", EXIT_TERMINATED: "terminated (SIGTERM)"}
    return f"exit code {code}{', ' + names[code] if code in names else ''}" + (f": {last}" if last else "")


def last_line(message: str) -> str:
    """Return the trainer's error from a termination message, else its last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    if errors:
        return one_line(errors[-1].removeprefix("error:").strip())
    return _shorten_event(lines[-1]) if lines else ""


def _shorten_event(line: str) -> str:
    """Return the event and the step of a JSON line of the trainer; any other line unchanged."""
    try:
        event = json.loads(line)
        return f"last reported {event['event']} at step {event['step']}"
    except (ValueError, KeyError, TypeError):
        return one_line(line)


def _memory_limit(pod: Object, container: str) -> str | None:
    """Return the memory limit of a container, None if it has none."""
    for item in pod["spec"].get("containers", ()):
        if item["name"] == container:
            found = ((item.get("resources") or {}).get("limits") or {}).get("memory")
            return str(found) if found else None
    return None


# --- helpers ---------------------------------------------------------------------------------------------------------


def _condition(item: Object, kind: str) -> Object | None:
    """Return the condition of a type, None if the object has none."""
    conditions: Iterable[Object] = (item.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), None)


def _statuses(pod: Object) -> list[Object]:
    """Return the statuses of all containers, init containers first because they run first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
