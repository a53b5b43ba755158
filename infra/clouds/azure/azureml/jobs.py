"""Submits a run as a command job of Azure Machine Learning, with its environment."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi_azure_native import machinelearningservices as ml

from infra.clouds.azure.provision import node_fabric
from infra.clouds.azure.running import RunningJob
from infra.clouds.azure.settings import Settings
from infra.clouds.azure.storage import CHECKPOINTS, DATASETS, KEYLESS
from infra.contract import ENTRYPOINT, ServiceRun, Submitted

#: The service replaces it by the folder at which the input is mounted.
DATA_INPUT = "${{inputs.data}}"
_ENVIRONMENT = "trainer"


@dataclass(frozen=True)
class JobTarget:
    """Where and as whom a job runs: resource group, workspace, id of the compute cluster, client id of its identity."""

    group: pulumi.Input[str]
    workspace: pulumi.Input[str]
    compute: pulumi.Input[str]
    client_id: pulumi.Input[str]
    depends_on: Sequence[pulumi.Resource] = ()


def submit(name: str, settings: Settings, run: ServiceRun, target: JobTarget, parent: pulumi.Resource) -> Submitted:
    """Register the environment, the job, and the resource that cancels the job before it is deleted."""
    environment = _create_environment(name, settings.labels, run, target, parent)
    command = pulumi.Output.all(*run.arguments).apply(command_line)
    properties = _job_properties(settings, run, target, environment.id, command)
    job = ml.Job(
        name,
        # A job is immutable: a change gives it another name, which replaces it. No other input replaces it, because
        # what the service adds to a job would do so after the next refresh.
        id=pulumi.Output.all(command, environment.id, json.dumps(run.env, sort_keys=True)).apply(
            lambda values: f"{run.run}-{_digest([*values, settings.gpu.instance_type, run.num_nodes])}"
        ),
        resource_group_name=target.group,
        workspace_name=target.workspace,
        properties=properties,
        opts=pulumi.ResourceOptions(parent=parent, depends_on=list(target.depends_on), delete_before_replace=True),
    )
    running = RunningJob(
        f"{name}-running",
        endpoint=settings.azureml.endpoint,
        job=job.id,
        opts=pulumi.ResourceOptions(parent=parent, depends_on=[job], delete_before_replace=True),
    )
    options = pulumi.Output.concat(" --workspace-name ", target.workspace, " --resource-group ", target.group)
    return Submitted(
        name=job.name,
        page=pulumi.Output.concat("https://ml.azure.com/runs/", job.name, "?wsid=", running.job.apply(_workspace_id)),
        commands={
            "status": pulumi.Output.concat("az ml job show --name ", job.name, options),
            "logs": pulumi.Output.concat("az ml job stream --name ", job.name, options),
        },
    )


def command_line(arguments: Sequence[str]) -> str:
    """Return the shell line that the service runs instead of the entry point; `exec` passes signals to the trainer."""
    return shlex.join(["exec", ENTRYPOINT, *arguments])


def _create_environment(
    name: str, tags: Mapping[str, str], run: ServiceRun, target: JobTarget, parent: pulumi.Resource
) -> ml.EnvironmentVersion:
    """Register the trainer's image in the workspace; a version is immutable, so each image gets a new one."""
    child = pulumi.ResourceOptions(parent=parent, depends_on=list(target.depends_on))
    container = ml.EnvironmentContainer(
        f"{name}-environment",
        name=_ENVIRONMENT,
        resource_group_name=target.group,
        workspace_name=target.workspace,
        properties=ml.EnvironmentContainerPropertiesArgs(description="The trainer's image", tags=tags),
        opts=child,
    )
    return ml.EnvironmentVersion(
        f"{name}-image",
        name=container.name,
        version=pulumi.Output.from_input(run.image).apply(lambda image: _digest([image])),
        resource_group_name=target.group,
        workspace_name=target.workspace,
        properties=ml.EnvironmentVersionPropertiesArgs(
            image=run.image, os_type=ml.OperatingSystemType.LINUX, tags=tags
        ),
        opts=child,
    )


def _job_properties(
    settings: Settings,
    run: ServiceRun,
    target: JobTarget,
    environment: pulumi.Input[str],
    command: pulumi.Input[str],
) -> ml.CommandJobArgs:
    """Return a job with one process per machine: the trainer's launcher starts and restarts the other processes."""
    data = ml.UriFolderJobInputArgs(
        job_input_type="uri_folder",
        mode=ml.InputDeliveryMode.READ_ONLY_MOUNT,
        uri=f"azureml://datastores/{DATASETS}/paths/{DATASETS}",
    )
    # Only for display in the studio: the trainer writes to the container itself, because a lost machine would lose what
    # the mount had not uploaded yet.
    checkpoints = ml.UriFolderJobOutputArgs(
        job_output_type="uri_folder",
        mode=ml.OutputDeliveryMode.READ_WRITE_MOUNT,
        uri=f"azureml://datastores/{CHECKPOINTS}/paths/{CHECKPOINTS}/{run.run}",
    )
    # The user's variables may hold secrets; one secret input makes Pulumi treat all of the job as secret.
    fabric = node_fabric(settings).env
    user_env = {
        name: value if fabric.get(name) == value else pulumi.Output.secret(value) for name, value in run.env.items()
    }
    variables: dict[str, pulumi.Input[str]] = {**KEYLESS, "AZURE_CLIENT_ID": target.client_id, **user_env}
    return ml.CommandJobArgs(
        job_type="Command",
        display_name=run.run,
        experiment_name=settings.stack,
        command=command,
        environment_id=environment,
        compute_id=target.compute,
        environment_variables=variables,
        identity=ml.ManagedIdentityArgs(identity_type="Managed", client_id=target.client_id),
        distribution=ml.PyTorchArgs(distribution_type="PyTorch", process_count_per_instance=1),
        resources=ml.JobResourceConfigurationArgs(
            instance_count=run.num_nodes,
            # A quarter of the machine's memory: tmpfs uses memory only for what it holds.
            shm_size=f"{int(settings.instance.memory_gib) // 4}g",
        ),
        inputs={"data": data} if run.reads_data else {},
        outputs={"checkpoints": checkpoints},
        tags=settings.labels,
    )


def _digest(value: Any) -> str:
    """Return eight hexadecimal digits of a JSON value's hash."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _workspace_id(job: str) -> str:
    """Return the workspace of a job's resource id."""
    return job.partition("/jobs/")[0]
