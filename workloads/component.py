"""The Pulumi component that registers the training's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import pulumi

from infra.contract import Cluster
from trainer.config import TrainConfig
from trainer.config.run_paths import checkpoints_uri
from workloads.facts import Facts, draft_facts, resolve_facts
from workloads.image import trainer_image
from workloads.launchers import torchx
from workloads.manifests import ACCOUNT, CONFIG, DATASET, JOB, NETCHECK, NETWORK_POLICY, QUOTA, build_manifests
from workloads.objects.manifest import Manifest
from workloads.settings import JobSettings

#: Warnings about a launcher.
_WARNINGS = {"trainjob": "an alpha API that may still change, and not elastic yet; pytorchjob is stable and elastic"}
#: A changed Job is a new Job. The old one is deleted first, as two must not write the checkpoints of one run.
_DELETED_BEFORE_REPLACE = {DATASET, NETCHECK, JOB}
#: Objects that every pod needs.
_CREATED_FIRST = {ACCOUNT, QUOTA, NETWORK_POLICY, CONFIG}


class TrainingJob(pulumi.ComponentResource):
    """The trainer's job and its companions on a cluster; `job` is the stack's output of that name."""

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
        """Build the image, then register the objects in order."""
        super().__init__("torchrec-cloud:workloads:TrainingJob", name, {"launcher": job.launcher}, opts)
        if job.launcher in _WARNINGS:
            pulumi.log.warn(f"job.launcher {job.launcher}: {_WARNINGS[job.launcher]}", self)
        self._name, self._provider, self._job_settings = name, cluster.provider, job
        self._after = [*after, *cluster.before_workloads]
        image = trainer_image(f"{name}-image", cluster, job, pulumi.ResourceOptions(parent=self))
        self.facts = resolve_facts(cluster, image, job, trainer, queued=queued, monitored=monitored)
        manifests = self.facts.apply(build_manifests)
        drafts = build_manifests(draft_facts(cluster, job, trainer, queued=queued, monitored=monitored))
        self._register(drafts, manifests)
        self.job = self.facts.apply(lambda facts: manifests.apply(lambda built: _summary(facts, built)))
        self.register_outputs({"job": self.job})

    def _register(self, drafts: Mapping[str, Manifest], manifests: pulumi.Output[dict[str, Manifest]]) -> None:
        """Register every object; `drafts` have the kinds and fields of `manifests`, and do not depend on the cloud."""
        registered: dict[str, pulumi.Resource] = {}
        for key, draft in drafts.items():
            manifest = manifests[key]
            before = [registered[item] for item in _dependencies(key, self._job_settings) if item in registered]
            registered[key] = KubernetesObject(
                f"{self._name}-{key}",
                draft["apiVersion"],
                draft["kind"],
                {field: manifest[field] for field in draft},
                pulumi.ResourceOptions(
                    parent=self,
                    provider=self._provider,
                    depends_on=[*self._after, *before],
                    delete_before_replace=key in _DELETED_BEFORE_REPLACE,
                    replace_with=_replaced_with(key, registered),
                    custom_timeouts=_timeouts(key, self._job_settings),
                ),
            )


class KubernetesObject(pulumi.CustomResource):
    """An object of any kind from its manifest, with the type token that the SDK's class for the kind has.

    The SDK's classes need every field as an argument, and its `CustomResource` allows no field but `spec`. This class
    passes the manifest on unchanged, as the tests validate it.
    """

    def __init__(
        self,
        name: str,
        api_version: str,
        kind: str,
        body: Mapping[str, pulumi.Input[object]],
        opts: pulumi.ResourceOptions,
    ) -> None:
        """Register the object with the fields in `body`."""
        token = api_version if "/" in api_version else f"core/{api_version}"
        provider = pulumi.ResourceOptions(version=version("pulumi-kubernetes"))
        super().__init__(f"kubernetes:{token}:{kind}", name, dict(body), pulumi.ResourceOptions.merge(opts, provider))


def _replaced_with(key: str, registered: Mapping[str, pulumi.Resource]) -> list[pulumi.Resource] | None:
    """Return the objects with which an object is replaced.

    A netcheck needs the nodes of a running training, so the training is deleted before and resumes after it.
    """
    return [registered[NETCHECK]] if key == JOB and NETCHECK in registered else None


def _dependencies(key: str, job: JobSettings) -> list[str]:
    """Return the objects that must exist before an object; a Job that Pulumi waits for must have succeeded."""
    if key in _CREATED_FIRST:
        return []
    if key not in _DELETED_BEFORE_REPLACE:
        return [ACCOUNT]
    queue = ["queue-resourceflavor", "queue-clusterqueue", "queue-localqueue"]
    dependencies = [*sorted(_CREATED_FIRST), *queue]
    if key == NETCHECK:
        return [*dependencies, "netcheck-service"]
    if key == JOB:
        dependencies += ["job-service", "job-trainingruntime", "budget"]
        # Also without a gate, as the pods of the older Job get the nodes first.
        dependencies += [NETCHECK]
        dependencies += [DATASET] if job.dataset.wait else []
    return dependencies


def _timeouts(key: str, job: JobSettings) -> pulumi.CustomTimeouts | None:
    """Return how long Pulumi waits for a Job that must succeed; None for the provider's default of ten minutes."""
    if key == DATASET:
        return pulumi.CustomTimeouts(create=f"{round(job.dataset.timeout_hours * 60)}m")
    if key == NETCHECK:
        return pulumi.CustomTimeouts(create=f"{job.netcheck.timeout_minutes}m")
    return None


def _summary(facts: Facts, manifests: Mapping[str, Manifest]) -> Mapping[str, object]:
    """Return the stack's output `job`, with which `python -m workloads` finds the job."""
    job = manifests.get(JOB)
    summary: dict[str, object] = {
        "run": facts.job.run,
        "launcher": facts.job.launcher,
        "namespace": facts.namespace,
        "nodes": facts.nodes,
        "kind": job["kind"] if job else None,
        "name": job["metadata"]["name"] if job else None,
        "image": facts.image,
        "checkpoints": checkpoints_uri(facts.checkpoint_uri, facts.job.run),
    }
    if job is None:
        summary["torchx"] = torchx.job_manifest(facts, manifests[CONFIG]["metadata"]["name"])
    return summary
