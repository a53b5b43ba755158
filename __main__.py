"""The Pulumi program: settings, then a cluster, then its operators, then the training job on it."""

from collections.abc import Iterable

import pulumi

from infra import stack
from infra.addons.addons import Addons
from infra.config.problems import Problem
from infra.interrupt import end_without_a_trace
from infra.outputs import export_all, export_service
from trainer.config import TrainConfig
from workloads import checks
from workloads.component import TrainingJob
from workloads.launchers import torchx
from workloads.managed import ManagedTraining
from workloads.settings import SECTIONS, JobSettings


def main() -> None:
    """Provision the stack that `Pulumi.<stack>.yaml` describes, and start its job."""
    end_without_a_trace()
    configured = stack.load(sections=SECTIONS, further=[job_problems])
    wanted = configured.settings
    job = configured.section("job", JobSettings)
    trainer = configured.section("trainer", TrainConfig)

    if wanted.service:
        run_on_service(configured, job, trainer)
        return
    cluster = configured.cloud.provision(wanted.stack, wanted)
    addons = Addons(
        f"{wanted.stack}-addons",
        cluster,
        launcher=job.launcher,
        monitored=wanted.addons.monitoring,
        queued=wanted.addons.kueue,
    )
    training = TrainingJob(
        f"{wanted.stack}-training",
        cluster,
        job,
        trainer,
        queued=wanted.addons.kueue,
        monitored=wanted.addons.monitoring,
        after=addons.ready,
    )
    start = [torchx.run_line(wanted.stack)] if job.launcher == "torchx" else []
    export_all(cluster, wanted, then=[*start, f"python -m workloads status --stack {wanted.stack}"])
    pulumi.export("job", training.job)


def run_on_service(configured: stack.Stack, job: JobSettings, trainer: TrainConfig) -> None:
    """The cloud's own training service in place of a cluster and its operators."""
    wanted = configured.settings
    service = configured.cloud.serve(wanted.stack, wanted)
    name = f"{wanted.stack}-training"
    training = ManagedTraining(name, service, job, trainer, mount_path=wanted.storage.mount_path)
    export_service(service, wanted, training.job)
    pulumi.export("job", training.job)


def job_problems(configured: stack.Stack) -> Iterable[Problem]:
    """Mistakes between the job's settings and the cluster's."""
    wanted = configured.settings
    pool = checks.Pool(
        nodes_desired=wanted.gpu.nodes.desired,
        nodes_max=wanted.gpu.nodes.max,
        gpus_per_node=wanted.gpus_per_node,
        has_registry=wanted.has_registry,
        mount_path=wanted.storage.mount_path,
        work_path=f"{wanted.storage.mount_path.rstrip('/')}/{wanted.work_folder}",
        shows_bucket=wanted.bucket_folder is not None,
        services=wanted.services,
    )
    return checks.problems(configured.section("job", JobSettings), configured.section("trainer", TrainConfig), pool)


main()
