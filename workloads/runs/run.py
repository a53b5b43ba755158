"""A run and the cluster on which it trains."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from infra.kube_api import KubeApi, KubeApiError, Object, api_path
from workloads.errors import UserError
from workloads.facts import COMPONENT_LABEL, RUN_LABEL
from workloads.objects.manifest import TRAINING

#: The kinds of a training job. An owner comes before the kinds that it owns.
JOB_KINDS = ("TrainJob", "PyTorchJob", "Job")


@dataclass(frozen=True)
class Run:
    """A run on a cluster; `find_job` searches for the job if `job_kind` and `job_name` are None.

    `start_command` starts the run again; `options` are the command-line options that select it.
    """

    api: KubeApi
    namespace: str
    name: str
    job_kind: str | None = None
    job_name: str | None = None
    nodes: int | None = None
    checkpoints: str | None = None
    start_command: str = "pulumi up"
    options: str = ""

    @property
    def pod_selector(self) -> str:
        """Return the label selector of the run's pods."""
        return f"{RUN_LABEL}={self.name},{COMPONENT_LABEL}={TRAINING}"

    def list_pods(self) -> list[Object]:
        """Return the pods of the run, including pods of jobs that were replaced."""
        return self.api.items(api_path(self.namespace, "Pod"), labelSelector=self.pod_selector)

    def find_job(self) -> tuple[str, Object] | None:
        """Return the kind and the object of the run's job: the stack's own, else the newest; None if there is none."""
        if self.job_kind and self.job_name:
            job = self.api.find(api_path(self.namespace, self.job_kind, self.job_name))
            if job is not None:
                return self.job_kind, job
        refusal: KubeApiError | None = None
        for kind in JOB_KINDS:
            try:
                jobs = self.api.items(api_path(self.namespace, kind), labelSelector=self.pod_selector)
            except KubeApiError as error:
                if error.status != HTTPStatus.FORBIDDEN:  # role `view` shows Jobs, but not the operators' kinds
                    raise
                refusal = refusal or error
                continue
            if jobs:
                return kind, max(jobs, key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
        if refusal:
            raise refusal
        return None

    def get_job(self) -> tuple[str, Object]:
        """Return the kind and the object of the run's job; raise UserError if there is none."""
        found = self.find_job()
        if found is None:
            message = f"run {self.name!r} has no job in namespace {self.namespace!r}"
            raise UserError(f"{message}. Fix: {self.start_command}")
        return found
