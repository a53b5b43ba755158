"""Registers the training's objects: the one thin part of this package that talks to Pulumi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import pulumi

from infra.contract import Cluster
from trainer.config import TrainConfig
from trainer.config.run_paths import checkpoints_uri
from workloads import manifests as m
from workloads.facts import Facts, draft, resolve
from workloads.image import trainer_image
from workloads.launchers import torchx
from workloads.objects.names import Manifest
from workloads.settings import JobSettings

#: What a person should know before choosing a launcher.
_NOTICES = {"trainjob": "an alpha API, which may still change, and not elastic yet; pytorchjob is stable and elastic"}
#: A Job that changed is another Job. The old one goes first: two must not write the checkpoints of one run.
_REPLACED_IN_TURN = {m.DATASET, m.NETCHECK, m.JOB}
#: What every pod needs from the start.
_FIRST = {m.ACCOUNT, "quota", "network-policy", "config"}


class TrainingJob(pulumi.ComponentResource):
    """The trainer's job and its companions on a cluster; `facts` are what they were made from, `job` where to look."""

    facts: pulumi.Output[Facts]
    job: pulumi.Output[Mapping[str, object]]

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        job: JobSettings,
        trainer: TrainConfig,
        *,
        queued: bool,
        monitored: bool,
        after: Sequence[pulumi.Resource] = (),
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:workloads:TrainingJob", name, {"launcher": job.launcher}, opts)
        if job.launcher in _NOTICES:
            pulumi.log.warn(f"job.launcher {job.launcher}: {_NOTICES[job.launcher]}", self)
        self._name, self._provider = name, cluster.provider
        self._after = [*after, *cluster.before_workloads]
        image = trainer_image(f"{name}-image", cluster, job, pulumi.ResourceOptions(parent=self))
        self.facts = resolve(cluster, image, job, trainer, queued=queued, monitored=monitored)
        known = m.manifests(draft(cluster, job, trainer, queued=queued, monitored=monitored))
        made: dict[str, pulumi.Resource] = {}
        for key, shape in known.items():
            made[key] = self._object(key, shape, job, [made[item] for item in _before(key, job) if item in made])
        self.job = self.facts.apply(_summary)
        self.register_outputs({"job": self.job})

    def _object(
        self, key: str, shape: Manifest, job: JobSettings, before: Sequence[pulumi.Resource]
    ) -> pulumi.Resource:
        """One object; `shape` gives its kind and keys, which do not depend on what the cloud computes."""
        real = self.facts.apply(lambda facts: m.manifests(facts)[key])
        return KubernetesObject(
            f"{self._name}-{key}",
            shape["apiVersion"],
            shape["kind"],
            {name: real[name] for name in shape},
            pulumi.ResourceOptions(
                parent=self,
                provider=self._provider,
                depends_on=[*self._after, *before],
                delete_before_replace=key in _REPLACED_IN_TURN,
                custom_timeouts=_timeouts(key, job),
            ),
        )


class KubernetesObject(pulumi.CustomResource):
    """An object of any kind from its manifest, under the type that the provider's own class for the kind has.

    The SDK's classes want each field by its own name, `CustomResource` takes nothing beside `spec`; the manifests here
    are what the API server reads, and what the tests validate.
    """

    def __init__(
        self,
        name: str,
        api_version: str,
        kind: str,
        body: Mapping[str, pulumi.Input[object]],
        opts: pulumi.ResourceOptions,
    ) -> None:
        token = api_version if "/" in api_version else f"core/{api_version}"
        provider = pulumi.ResourceOptions(version=version("pulumi-kubernetes"))
        super().__init__(f"kubernetes:{token}:{kind}", name, dict(body), pulumi.ResourceOptions.merge(opts, provider))


def _before(key: str, job: JobSettings) -> list[str]:
    """What must exist before the object `key`, or have succeeded where it is a Job that Pulumi waits for."""
    if key in _FIRST:
        return []
    if key not in _REPLACED_IN_TURN:
        return [m.ACCOUNT]
    queue = ["queue-resourceflavor", "queue-clusterqueue", "queue-localqueue"]
    before = [*sorted(_FIRST), *queue]
    if key == m.NETCHECK:
        return [*before, "netcheck-service"]
    if key == m.JOB:
        before += ["job-service", "job-trainingruntime", "budget"]
        before += [m.NETCHECK] if job.netcheck.gate else []
        before += [m.DATASET] if job.dataset.wait else []
    return before


def _timeouts(key: str, job: JobSettings) -> pulumi.CustomTimeouts | None:
    """How long Pulumi waits for a Job that must succeed; for all else the provider's own ten minutes."""
    if key == m.DATASET:
        return pulumi.CustomTimeouts(create=f"{round(job.dataset.timeout_hours * 60)}m")
    if key == m.NETCHECK:
        return pulumi.CustomTimeouts(create=f"{job.netcheck.timeout_minutes}m")
    return None


def _summary(facts: Facts) -> Mapping[str, object]:
    """What `python -m workloads` needs to find the job: plain values for the stack's output `job`."""
    made = m.manifests(facts)
    found = made.get(m.JOB)
    summary: dict[str, object] = {
        "run": facts.job.run,
        "launcher": facts.job.launcher,
        "namespace": facts.namespace,
        "nodes": facts.nodes,
        "kind": found["kind"] if found else None,
        "name": found["metadata"]["name"] if found else None,
        "image": facts.image,
        "checkpoints": checkpoints_uri(facts.checkpoint_uri, facts.job.run),
    }
    if found is None:
        summary["torchx"] = torchx.job_manifest(facts, made[m.CONFIG]["metadata"]["name"])
    return summary
