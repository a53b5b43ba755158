"""`batch/v1` Indexed Job with a headless service: needs no operator; torchrun meets at the pod of index 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workloads.facts import Facts
from workloads.launchers import Launched
from workloads.objects.arguments import TRAIN, launch, queue_labels
from workloads.objects.common import NO_WAIT, headless_service, manifest, training_labels
from workloads.objects.names import Manifest, hashed
from workloads.objects.pod import training_pod

#: The trainer's exit code for a mistake in its settings, which no restart mends.
_MISTAKE = 2
#: Its exit code when it was told to go and has saved, by a signal or by the cloud's notice.
_RESTART = 75


def launched(facts: Facts, config_map: str) -> Launched:
    """The service, then the Job."""
    labels = training_labels(facts)
    service = headless_service(facts, facts.job.run, labels)

    def args(name: str) -> list[str]:
        return launch(facts, name, f"{name}-0.{facts.job.run}", TRAIN)

    job = indexed_job(facts, facts.job.run, labels, args, config_map=config_map, subdomain=facts.job.run, waited=False)
    job["metadata"]["labels"] |= queue_labels(facts)
    return Launched(job, (service,))


def indexed_job(
    facts: Facts,
    base: str,
    labels: Mapping[str, str],
    args: Callable[[str], Sequence[str]],
    *,
    config_map: str | None,
    subdomain: str,
    waited: bool,
    deadline_seconds: int | None = None,
) -> Manifest:
    """One pod per node under the name `<base>-<hash of the specification>`; `args` are told that name.

    `waited` says whether Pulumi waits for the Job's end.
    """

    def spec(name: str) -> Manifest:
        pod = training_pod(
            facts, labels=labels, container="trainer", args=args(name), config_map=config_map, subdomain=subdomain
        )
        pod["spec"]["restartPolicy"] = "Never"
        return _job_spec(facts, pod) | ({"activeDeadlineSeconds": deadline_seconds} if deadline_seconds else {})

    # The name is in the arguments, so the hash is of the specification of a job without a name.
    name = hashed(base, spec(""))
    body = manifest(
        facts, "batch/v1", "Job", name, {"spec": spec(name)}, labels=labels, annotations=None if waited else NO_WAIT
    )
    return body


def _job_spec(facts: Facts, pod: Manifest) -> Manifest:
    """A pod that was evicted, told to go or whose node went is replaced without counting; a mistake ends the Job.

    Any other failure counts for its index alone, and an index that is given up ends the Job: the rest cannot train
    without it.
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
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [_RESTART]},
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [_MISTAKE]},
                },
            ]
        },
        "template": pod,
    }
