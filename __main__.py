"""The Pulumi program: reads the settings, then creates the cluster, its operators and the training job."""

from collections.abc import Iterable

import pulumi

from infra import stack
from infra.addons.addons import Addons
from infra.config.problems import Problem
from infra.interrupt import exit_silently_on_interrupt, report_errors_once
from infra.outputs import export_all, export_service
from trainer.config import TrainConfig
from workloads import checks
from workloads.component import TrainingJob
from workloads.launchers import torchx
from workloads.managed import ManagedTraining
from workloads.settings import SECTIONS, JobSettings


def main() -> None:
    """Provision the stack of `Pulumi.<stack>.yaml` and start its job."""
    exit_silently_on_interrupt()
    configured = stack.load(sections=SECTIONS, further=[find_job_problems])
    job = configured.section("job", JobSettings)
    trainer = configured.section("trainer", TrainConfig)
    if notice := checks.synthetic_data_notice(job, trainer):
        pulumi.log.info(notice)
    if configured.settings.service:
        train_on_service(configured, job, trainer)
    else:
        train_on_cluster(configured, job, trainer)


def train_on_cluster(configured: stack.Stack, job: JobSettings, trainer: TrainConfig) -> None:
    """Create a cluster with its operators, and run the job on it."""
    settings = configured.settings
    cluster = configured.cloud.provision(settings.stack, settings)
    addons = Addons(
        f"{settings.stack}-addons",
        cluster,
        launcher=job.launcher,
        monitored=settings.addons.monitoring,
        queued=settings.addons.kueue,
    )
    training = TrainingJob(
        f"{settings.stack}-training",
        cluster,
        job,
        trainer,
        queued=settings.addons.kueue,
        monitored=settings.addons.monitoring,
        after=addons.ready,
    )
    start = [torchx.run_line(settings.stack)] if job.launcher == "torchx" else []
    export_all(cluster, settings, then=[*start, f"python -m workloads status --stack {settings.stack}"])
    pulumi.export("job", training.job)


def train_on_service(configured: stack.Stack, job: JobSettings, trainer: TrainConfig) -> None:
    """Run the job on the cloud's own training service, without a cluster."""
    settings = configured.settings
    service = configured.cloud.serve(settings.stack, settings)
    name = f"{settings.stack}-training"
    training = ManagedTraining(name, service, job, trainer, mount_path=settings.storage.mount_path)
    export_service(service, settings, training.job)
    pulumi.export("job", training.job)


def find_job_problems(configured: stack.Stack) -> Iterable[Problem]:
    """Return the mistakes between the settings of the job, the trainer and the cluster."""
    job, trainer = configured.section("job", JobSettings), configured.section("trainer", TrainConfig)
    return checks.problems(job, trainer, configured.settings)


with report_errors_once():
    main()
