"""Why a pod waits or ended, in words that a person can act on; pure functions of what the API server holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from infra.kube_api import Object
from infra.text import one_line

GPU = "nvidia.com/gpu"
#: One cause in a scheduler's sentence: `2 Insufficient cpu`; commas inside braces belong to a taint.
_CAUSE = re.compile(r"(\d+) ((?:[^,.{]|\{[^}]*\}|\.(?! |$))+)")
_MISTAKE = 2
_KILLED, _TERMINATED = 137, 143


@dataclass(frozen=True)
class Room:
    """What the cluster's nodes offer: allocatable amounts by node; None where these credentials may not list nodes."""

    nodes: Sequence[Mapping[str, str]] | None
    pods_wanted: int


def explain(pod: Object, events: Sequence[Object], room: Room) -> str | None:
    """One sentence, or None where nothing is wrong."""
    return _ended(pod) or _unscheduled(pod, events, room) or _waiting(pod, events)


# --- not on a node yet -----------------------------------------------------------------------------------------------


def _unscheduled(pod: Object, events: Sequence[Object], room: Room) -> str | None:
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition.get("status") == "True":
        return None
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates", ()))
        return f"held back by {gates or 'a scheduling gate'}: not admitted yet"
    message = str(condition.get("message") or "")
    causes = [_cause(int(count), what.strip(), pod, room) for count, what in causes_of(message)]
    words = "; ".join(dict.fromkeys(filter(None, causes))) or one_line(message) or "the scheduler has not looked at it"
    return words + _autoscaler(events)


def causes_of(message: str) -> list[tuple[str, str]]:
    """Count and cause of each part of `0/3 nodes are available: 1 Insufficient x, 2 node(s) had ...`.

    A sentence without counts (a claim that is not bound) counts as one cause.
    """
    _, colon, listed = message.partition("nodes are available:")
    listed = (listed if colon else message).split(" preemption:")[0]
    sentence = listed.strip().partition(". ")[0].strip(" .")
    return _CAUSE.findall(listed) or ([("0", sentence)] if sentence else [])


def _cause(count: int, what: str, pod: Object, room: Room) -> str:
    nodes = f"{count} {'node' if count == 1 else 'nodes'}"
    if what.startswith("Insufficient "):
        return _insufficient(what.removeprefix("Insufficient "), nodes, pod, room)
    if "untolerated taint" in what:
        taint = what.partition("{")[2].rstrip("}").replace(": ", "=", 1).rstrip("=")
        return f"{nodes}: untolerated taint {taint}, which the job does not tolerate"
    if "anti-affinity" in what:
        return f"{nodes}: taken by another training pod, and each pod wants a node of its own"
    if "node affinity" in what or "selector" in what:
        wanted = ", ".join(f"{key}={value}" for key, value in (pod["spec"].get("nodeSelector") or {}).items())
        return f"{nodes}: without the labels that the pod selects ({wanted or 'node affinity'})"
    if "ersistentvolumeclaim" in what.lower():
        claims = ", ".join(claims_of(pod)) or "a claim"
        return f"unbound claim {claims}: {what[:1].lower()}{what[1:]}"
    if what.startswith("no nodes"):
        return "the cluster has no nodes"
    return f"{nodes}: {what.removeprefix('node(s) ')}"


def _insufficient(resource: str, nodes: str, pod: Object, room: Room) -> str:
    wanted = requested(pod, resource)
    base = f"Insufficient {resource}: "
    if room.nodes is None or wanted is None:
        return f"{base}{nodes} too few of it free" + (f", the pod wants {wanted}" if wanted else "")
    fitting = sum(quantity(node.get(resource, "0")) >= quantity(wanted) for node in room.nodes)
    what = "GPUs" if resource == GPU else resource
    if fitting < room.pods_wanted:
        have = f"{fitting} {'node has' if fitting == 1 else 'nodes have'} {wanted} {what}"
        needed = f"{room.pods_wanted} {'is' if room.pods_wanted == 1 else 'are'} needed"
        return f"{base}{have}, {needed}"
    return f"{base}{fitting} nodes have {wanted} {what}, but other pods use them"


def requested(pod: Object, resource: str) -> str | None:
    """What one pod wants of a resource, as its containers' limits or requests write it; None where it says nothing."""
    for container in pod["spec"].get("containers", ()):
        resources = container.get("resources") or {}
        found = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        if found:
            return str(found)
    return None


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: `8`, `500m`, `1152Gi`."""
    digits = text.rstrip("KMGTPEikmu")
    unit = text[len(digits) :]
    if unit == "m":
        return float(digits) / 1000
    power = " KMGTPE".index(unit[:1].upper()) if unit else 0
    return float(digits) * float(1024 if unit.endswith("i") else 1000) ** power


def claims_of(pod: Object) -> list[str]:
    """Names of the claims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or ()
    return [item["persistentVolumeClaim"]["claimName"] for item in volumes if "persistentVolumeClaim" in item]


def _autoscaler(events: Sequence[Object]) -> str:
    for event in reversed(events):
        if event.get("reason") == "TriggeredScaleUp":
            return "; the autoscaler is adding nodes"
        if event.get("reason") == "NotTriggerScaleUp":
            return f"; the autoscaler adds none: {one_line(event.get('message'), 160)}"
    return ""


# --- on a node, not running ------------------------------------------------------------------------------------------


def _waiting(pod: Object, events: Sequence[Object]) -> str | None:
    for status in _statuses(pod):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting:
            found = _why_waiting(status, waiting, pod, events)
            if found:
                return found
    return None


def _why_waiting(status: Object, waiting: Object, pod: Object, events: Sequence[Object]) -> str | None:
    reason, message = str(waiting.get("reason") or ""), one_line(waiting.get("message") or "")
    if reason in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"):
        told = message if reason != "ImagePullBackOff" else _last(events, "Failed") or message
        return f"{reason}: image {_image(pod, status)} cannot be pulled: {told or 'the registry did not say why'}"
    if reason == "CrashLoopBackOff":
        last = (status.get("lastState") or {}).get("terminated")
        return f"CrashLoopBackOff: {ending(last, pod, str(status['name'])) if last else message}"
    if reason in ("ContainerCreating", "PodInitializing", ""):
        mount = _last(events, "FailedMount") or _last(events, "FailedAttachVolume")
        sandbox = _last(events, "FailedCreatePodSandBox")
        return f"volume: {mount}" if mount else f"network: {sandbox}" if sandbox else None
    return f"{reason}: {message}" if message else reason


def _image(pod: Object, status: Object) -> str:
    spec = pod["spec"]
    containers = [*spec.get("containers", ()), *spec.get("initContainers", ())]
    return str(next((item["image"] for item in containers if item["name"] == status["name"]), status.get("image")))


def _last(events: Sequence[Object], reason: str) -> str | None:
    for event in reversed(events):
        if event.get("reason") == reason:
            return one_line(event.get("message"))
    return None


# --- ended -----------------------------------------------------------------------------------------------------------


def _ended(pod: Object) -> str | None:
    status = pod.get("status") or {}
    if status.get("phase") == "Succeeded":
        return None
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted is not None and disrupted.get("status") == "True":
        told = one_line(disrupted.get("message") or "")
        return f"{disrupted.get('reason') or 'disrupted'}: {told or 'its node was taken away'}"
    for item in _statuses(pod):
        ended = (item.get("state") or {}).get("terminated")
        if ended and ended.get("exitCode"):
            return ending(ended, pod, str(item["name"]))
    if status.get("phase") == "Failed":
        return f"{status.get('reason') or 'Failed'}: {one_line(status.get('message') or 'nothing says why')}"
    return None


def ending(ended: Object, pod: Object, container: str) -> str:
    """How a container ended: its exit code in words, and the last line it wrote."""
    code, last = int(ended.get("exitCode") or 0), last_line(str(ended.get("message") or ""))
    if ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, container)
        more = f" over its limit of {limit}" if limit else ": the node had no more"
        return f"OOMKilled: {container} used memory{more}; job.memory_gib, or a smaller batch"
    if code == _MISTAKE:
        return f"exit code 2, a mistake in the settings: {last or 'see `python -m workloads logs`'}"
    names = {_KILLED: "killed (SIGKILL)", _TERMINATED: "asked to end (SIGTERM)"}
    return f"exit code {code}{', ' + names[code] if code in names else ''}" + (f": {last}" if last else "")


def last_line(message: str) -> str:
    """What a termination message says: the trainer's own error where there is one, else its last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    if errors:
        return one_line(errors[-1].removeprefix("error:").strip())
    return _plain(lines[-1]) if lines else ""


def _plain(line: str) -> str:
    """A JSON line of the trainer as `event step`; any other line as it is."""
    try:
        event = json.loads(line)
        return f"last reported {event['event']} at step {event['step']}"
    except (ValueError, KeyError, TypeError):
        return one_line(line)


def _memory_limit(pod: Object, container: str) -> str | None:
    for item in pod["spec"].get("containers", ()):
        if item["name"] == container:
            found = ((item.get("resources") or {}).get("limits") or {}).get("memory")
            return str(found) if found else None
    return None


# --- small things ----------------------------------------------------------------------------------------------------


def _condition(item: Object, kind: str) -> Object | None:
    conditions: Iterable[Object] = (item.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), None)


def _statuses(pod: Object) -> list[Object]:
    """Of the containers, those of initialisation first: they run first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
