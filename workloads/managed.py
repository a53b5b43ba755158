"""The training job on a cloud's managed training service: the same image and settings, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pulumi

from infra.contract import ServiceRun, TrainingService
from trainer.config import TrainConfig, leaves
from trainer.config.run_paths import checkpoints_uri
from workloads.facts import job_nodes, with_job_settings
from workloads.image import trainer_image
from workloads.settings import JobSettings


class ManagedTraining(pulumi.ComponentResource):
    """A run of the trainer on a service; `job` is the stack's output of that name."""

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
        """Build the image and submit the run."""
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
    """Return the image's arguments: the launch options of the service, the data's location and the settings."""
    data = pulumi.Output.concat(f"--data-at={mount_path.rstrip('/')}=", service.data_path)
    return [
        "launch",
        "--service=auto",
        f"--nproc={job.gpus_per_node or service.gpu.gpus_per_node}",
        f"--max-restarts={job.max_restarts}",
        *([data] if reads_data(trainer, mount_path) else []),
        "train",
        *trainer_options(train_config(service, job, trainer)),
        pulumi.Output.concat("--checkpoint.uri=", service.checkpoint_uri),
    ]


def reads_data(trainer: TrainConfig, mount_path: str) -> bool:
    """Return whether the run reads the bucket's datasets as files; other runs generate samples or open a URI."""
    below = mount_path.rstrip("/") + "/"
    return any(f"{path or ''}/".startswith(below) for path in (trainer.data.path, trainer.data.eval_path))


def train_config(service: TrainingService, job: JobSettings, trainer: TrainConfig) -> TrainConfig:
    """Return the stack's `trainer` section for the service, whose environment sets the folder of the logs."""
    return with_job_settings(trainer, job, service.gpu.interruptible, {"train": {"device": "cuda"}})


def trainer_options(config: TrainConfig) -> list[str]:
    """Return the settings that differ from their defaults as options of the trainer's command line."""
    found, tree = [], config.model_dump(mode="json")
    for path, field in leaves().items():
        value: object = tree
        for part in path:
            assert isinstance(value, dict), "sections are mappings"
            value = value[part]
        if value != _as_json(field.get_default(call_default_factory=True)):
            text = value if isinstance(value, str) else json.dumps(value)
            found.append(f"--{'.'.join(path).replace('_', '-')}={text}")
    return found


def _as_json(value: object) -> object:
    """Return a default as JSON represents it: tuples as lists, sections as mappings."""
    return json.loads(json.dumps(value, default=lambda item: item.model_dump(mode="json")))
