"""The Indexed Job that launcher `job` and the netcheck share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainer.exit_codes import EXIT_RESTART, EXIT_USER_ERROR
from workloads.facts import Facts
from workloads.objects.manifest import AWAITED, NO_WAIT, Manifest, build_manifest, hashed_name
from workloads.objects.pod import training_pod

_CONTAINER = "trainer"


def indexed_job(
    facts: Facts,
    base: str,
    labels: Mapping[str, str],
    args: Callable[[str], Sequence[str]],
    *,
    config_map: str | None,
    subdomain: str,
    await_completion: bool,
    deadline_seconds: int | None = None,
) -> Manifest:
    """Return a Job named `<base>-<hash of the specification>` with one pod per node.

    `args` returns the container's arguments for that name. `await_completion` makes Pulumi wait for the Job's end.
    """

    def build_spec(name: str) -> Manifest:
        """Return the specification of a job with this name."""
        pod = training_pod(
            facts, labels=labels, container=_CONTAINER, args=args(name), config_map=config_map, subdomain=subdomain
        )
        pod["spec"]["restartPolicy"] = "Never"
        return _job_spec(facts, pod) | ({"activeDeadlineSeconds": deadline_seconds} if deadline_seconds else {})

    # The arguments contain the name, so the hash is of the specification with an empty name.
    name = hashed_name(base, build_spec(""))
    annotations = AWAITED if await_completion else NO_WAIT
    body = {"spec": build_spec(name)}
    return build_manifest(facts, "batch/v1", "Job", name, body, labels=labels, annotations=annotations)


def _job_spec(facts: Facts, pod: Manifest) -> Manifest:
    """Return the specification with the rules for failed pods.

    An evicted or preempted pod is replaced and does not count as a failure. A mistake in the settings ends the Job. Any
    other failure counts for its index; an index that reaches its limit ends the Job, as the others cannot train without
    it.
    """
    return {
        "completionMode": "Indexed",
        "completions": facts.nodes,
        "parallelism": facts.nodes,
        "backoffLimitPerIndex": facts.job.max_restarts,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exit_code(EXIT_RESTART)},
                {"action": "FailJob", "onExitCodes": _exit_code(EXIT_USER_ERROR)},
            ]
        },
        "template": pod,
    }


def _exit_code(code: int) -> Manifest:
    """Return the condition that the trainer exited with a code."""
    return {"containerName": _CONTAINER, "operator": "In", "values": [code]}
