"""The training job on a cloud's own training service: the same image and the same settings, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pulumi

from infra.contract import ServiceRun, TrainingService
from trainer.config import TrainConfig, leaves
from trainer.config.run_paths import checkpoints_uri
from workloads.facts import decided, job_nodes
from workloads.image import trainer_image
from workloads.settings import JobSettings


class ManagedTraining(pulumi.ComponentResource):
    """A run of the trainer on a service; `job` says where to look."""

    job: pulumi.Output[Mapping[str, object]]

    def __init__(
        self,
        name: str,
        service: TrainingService,
        job: JobSettings,
        trainer: TrainConfig,
        *,
        mount_path: str,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:workloads:ManagedTraining", name, {"launcher": job.launcher}, opts)
        image = trainer_image(f"{name}-image", service, job, pulumi.ResourceOptions(parent=self))
        run = ServiceRun(
            run=job.run,
            image=image,
            arguments=arguments(service, job, trainer, mount_path),
            num_nodes=job_nodes(job, service.gpu.num_nodes_desired),
            reads_data=reads_data(trainer, mount_path),
            env={**service.fabric.env, **job.env},
        )
        submitted = service.submit(f"{name}-job", run, self)
        self.job = pulumi.Output.all(
            name=submitted.name,
            page=submitted.page,
            image=image,
            checkpoints=pulumi.Output.from_input(service.checkpoint_uri).apply(
                lambda uri: checkpoints_uri(uri, job.run)
            ),
            commands=dict(submitted.commands),
        ).apply(lambda known: {"run": job.run, "launcher": job.launcher, "nodes": run.num_nodes, **known})
        self.register_outputs({"job": self.job})


def arguments(
    service: TrainingService, job: JobSettings, trainer: TrainConfig, mount_path: str
) -> list[pulumi.Input[str]]:
    """The image's arguments: torchrun as the service's environment says, data where the service has it, settings."""
    data = pulumi.Output.concat(f"--data-at={mount_path.rstrip('/')}=", service.data_path)
    return [
        "launch",
        "--service=auto",
        f"--nproc={job.gpus_per_node or service.gpu.gpus_per_node}",
        f"--max-restarts={job.max_restarts}",
        *([data] if reads_data(trainer, mount_path) else []),
        "train",
        *options(train_config(service, job, trainer)),
        pulumi.Output.concat("--checkpoint.uri=", service.checkpoint_uri),
    ]


def reads_data(trainer: TrainConfig, mount_path: str) -> bool:
    """Whether the run reads the bucket's datasets as files; others make their samples, or open a URI."""
    below = mount_path.rstrip("/") + "/"
    return any(f"{path or ''}/".startswith(below) for path in (trainer.data.path, trainer.data.eval_path))


def train_config(service: TrainingService, job: JobSettings, trainer: TrainConfig) -> TrainConfig:
    """The stack's `trainer` section with what is decided here; where logs go the service's environment says."""
    return decided(trainer, job, service.gpu.interruptible, {"train": {"device": "cuda"}})


def options(config: TrainConfig) -> list[str]:
    """The settings as the trainer's command line has them, those alone that are not the default's."""
    found, tree = [], config.model_dump(mode="json")
    for path, field in leaves().items():
        value: object = tree
        for part in path:
            assert isinstance(value, dict), "sections are mappings"
            value = value[part]
        if value != _json(field.get_default(call_default_factory=True)):
            text = value if isinstance(value, str) else json.dumps(value)
            found.append(f"--{'.'.join(path).replace('_', '-')}={text}")
    return found


def _json(value: object) -> object:
    """A default as JSON has it: tuples are lists, sections are mappings."""
    return json.loads(json.dumps(value, default=lambda item: item.model_dump(mode="json")))
