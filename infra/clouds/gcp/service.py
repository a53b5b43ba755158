"""Vertex AI instead of a cluster: a bucket, a registry, the job's service account, TensorBoard, and the job."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pulumi
import pulumi_gcp as gcp

from infra import catalog
from infra.clouds.gcp.credentials import JOB_APIS
from infra.clouds.gcp.provision import Apis
from infra.clouds.gcp.registry import ImageRegistry
from infra.clouds.gcp.settings import Settings, account_id
from infra.clouds.gcp.storage import CHECKPOINTS, DATASETS, checkpoint_bucket, grant_bucket
from infra.clouds.gcp.vertex import CustomJob, custom_job
from infra.clouds.gcp.vertex_client import CLIENT
from infra.components import optional_packages as packages
from infra.contract import Fabric, GpuPool, ServiceRun, Submitted, TrainingService


def serve(name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> TrainingService:
    """Create what a CustomJob needs; while no job runs, only the bucket's contents are billed."""
    if not packages.installed(CLIENT):
        raise pulumi.RunError(
            f"job.launcher {settings.service} needs the Python package {CLIENT}. Fix: {packages.INSTALL}"
        )
    apis = Apis(f"{name}-apis", settings.gcp_project, opts, JOB_APIS)
    enabled = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[apis]))
    vertex = VertexService(f"{name}-vertex", settings, enabled)
    registry = ImageRegistry(f"{name}-registry", settings, vertex.account, enabled)
    bucket = pulumi.Output.concat("gs://", vertex.bucket_name)
    return TrainingService(
        name=f"{settings.gcp_project}/{settings.region}",
        gpu=machine_pool(settings),
        fabric=Fabric("Vertex AI's own"),
        bucket_uri=bucket,
        checkpoint_uri=pulumi.Output.concat(bucket, f"/{CHECKPOINTS}"),
        # Vertex AI mounts each bucket that the job's account may read.
        data_path=pulumi.Output.concat("/gcs/", vertex.bucket_name, f"/{DATASETS}"),
        registry=registry.facts,
        labels=settings.labels,
        submit=lambda job, run, parent: vertex.submit(job, run, parent, [registry.reader]),
        commands={
            "registry_login": f"gcloud auth configure-docker {registry.server}",
            "upload_data": pulumi.Output.concat("gcloud storage rsync --recursive <folder> ", bucket, f"/{DATASETS}"),
        },
    )


def machine_pool(settings: Settings) -> GpuPool:
    """Return the machines as the contract's pool, without what only pods need."""
    gpu = settings.gpu
    return GpuPool(
        instance=catalog.instance(settings.cloud, gpu.instance_type),
        num_nodes_min=0,
        num_nodes_desired=gpu.nodes.desired,
        num_nodes_max=gpu.nodes.max,
        node_selector={},
        tolerations=(),
        resource_limits={},
        shared_memory_gib=0,
        interruptible=settings.interruptible,
    )


class VertexService(pulumi.ComponentResource):
    """The bucket, the job's service account and a TensorBoard instance; `submit` adds the job."""

    bucket_name: pulumi.Output[str]
    account: gcp.serviceaccount.Account

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        """Create the bucket, the account with its roles, and TensorBoard if the stack has it."""
        super().__init__("torchrec-cloud:gcp:Vertex", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.bucket_name = checkpoint_bucket(name, settings, self).name
        self.account = gcp.serviceaccount.Account(
            f"{name}-trainer",
            account_id=account_id(settings, "trainer"),
            display_name=f"Trainer of {settings.stack}",
            opts=self._child,
        )
        self._roles = self._grant_roles()
        self._tensorboard = self._create_tensorboard() if settings.vertex.tensorboard else None
        self.register_outputs({"bucket": self.bucket_name})

    def _grant_roles(self) -> list[pulumi.Resource]:
        """Let the job read the bucket and write checkpoints, logs and TensorBoard's curves."""
        project = self._settings.gcp_project
        roles = {"logs": "roles/logging.logWriter"}
        if self._settings.vertex.tensorboard:
            roles["user"] = "roles/aiplatform.user"
        return [
            *grant_bucket(self._name, self.bucket_name, self.account, self._child),
            *(
                gcp.projects.IAMMember(
                    f"{self._name}-{what}", project=project, role=role, member=self.account.member, opts=self._child
                )
                for what, role in roles.items()
            ),
        ]

    def _create_tensorboard(self) -> gcp.vertex.AiTensorboard:
        """Create the TensorBoard instance of the stack's jobs."""
        return gcp.vertex.AiTensorboard(
            f"{self._name}-tensorboard",
            display_name=f"{self._settings.project}-{self._settings.stack}",
            region=self._settings.region,
            labels=self._settings.labels,
            opts=self._child,
        )

    def submit(
        self, name: str, run: ServiceRun, parent: pulumi.Resource, depends_on: Sequence[pulumi.Resource]
    ) -> Submitted:
        """Submit one CustomJob; a changed request replaces the job, which is cancelled first."""
        settings = self._settings
        tensorboard = self._tensorboard.id.apply(_resource_path) if self._tensorboard else ""
        request = pulumi.Output.all(
            image=run.image,
            arguments=list(run.arguments),
            bucket=self.bucket_name,
            account=self.account.email,
            tensorboard=tensorboard,
        ).apply(lambda values: json.dumps(custom_job(settings, run, **values), sort_keys=True))
        job = CustomJob(
            name,
            project=settings.gcp_project,
            region=settings.region,
            endpoint=settings.vertex.endpoint,
            start_minutes=settings.vertex.start_minutes,
            machine_type=settings.gpu.instance_type,
            num_machines=run.num_nodes,
            request=request,
            opts=pulumi.ResourceOptions(
                parent=parent, depends_on=[*self._roles, *depends_on], delete_before_replace=True
            ),
        )
        number = job.id.apply(lambda full: full.rpartition("/")[2])
        options = f"--region {settings.region} --project {settings.gcp_project}"
        return Submitted(
            name=job.id,
            page=pulumi.Output.concat(
                f"https://console.cloud.google.com/vertex-ai/locations/{settings.region}/training/",
                number,
                f"?project={settings.gcp_project}",
            ),
            commands={
                "status": pulumi.Output.concat("gcloud ai custom-jobs describe ", number, f" {options}"),
                "logs": pulumi.Output.concat("gcloud ai custom-jobs stream-logs ", number, f" {options}"),
            },
        )


def _resource_path(name: str) -> str:
    """Return `projects/P/locations/R/tensorboards/N`, the form that a job's request needs."""
    return name[name.index("projects/") :] if "projects/" in name else name
