"""A run as a command job of Azure Machine Learning, with its environment."""

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

#: The service puts the folder at which the input is mounted in its place.
DATA_INPUT = "${{inputs.data}}"
_ENVIRONMENT = "trainer"


@dataclass(frozen=True)
class Place:
    """Where a job runs: resource group, workspace, compute cluster (its id), and as whom (the machines' identity)."""

    group: pulumi.Input[str]
    workspace: pulumi.Input[str]
    compute: pulumi.Input[str]
    client_id: pulumi.Input[str]
    after: Sequence[pulumi.Resource] = ()


def submitted(name: str, settings: Settings, run: ServiceRun, place: Place, parent: pulumi.Resource) -> Submitted:
    """Environment, job, and what cancels it before it is deleted."""
    environment = _environment(name, settings.labels, run, place, parent)
    command = pulumi.Output.all(*run.arguments).apply(command_line)
    properties = _properties(settings, run, place, environment.id, command)
    job = ml.Job(
        name,
        # A job cannot be changed: what is different has another name, and the old one goes first. Nothing else replaces
        # it, or what the service adds to a job would, after the next refresh.
        id=pulumi.Output.all(command, environment.id, json.dumps(run.env, sort_keys=True)).apply(
            lambda known: f"{run.run}-{_digest([*known, settings.gpu.instance_type, run.num_nodes])}"
        ),
        resource_group_name=place.group,
        workspace_name=place.workspace,
        properties=properties,
        opts=pulumi.ResourceOptions(parent=parent, depends_on=list(place.after), delete_before_replace=True),
    )
    running = RunningJob(
        f"{name}-running",
        endpoint=settings.azureml.endpoint,
        job=job.id,
        opts=pulumi.ResourceOptions(parent=parent, depends_on=[job], delete_before_replace=True),
    )
    where = pulumi.Output.concat(" --workspace-name ", place.workspace, " --resource-group ", place.group)
    return Submitted(
        name=job.name,
        page=pulumi.Output.concat("https://ml.azure.com/runs/", job.name, "?wsid=", running.job.apply(_workspace_of)),
        commands={
            "status": pulumi.Output.concat("az ml job show --name ", job.name, where),
            "logs": pulumi.Output.concat("az ml job stream --name ", job.name, where),
        },
    )


def command_line(arguments: Sequence[str]) -> str:
    """The service runs a shell line and not the image's entry point; with exec its signals reach the trainer."""
    return shlex.join(["exec", ENTRYPOINT, *arguments])


def _environment(
    name: str, tags: Mapping[str, str], run: ServiceRun, place: Place, parent: pulumi.Resource
) -> ml.EnvironmentVersion:
    """The trainer's image under a name of the workspace; a version is for ever, so another image is another one."""
    below = pulumi.ResourceOptions(parent=parent, depends_on=list(place.after))
    container = ml.EnvironmentContainer(
        f"{name}-environment",
        name=_ENVIRONMENT,
        resource_group_name=place.group,
        workspace_name=place.workspace,
        properties=ml.EnvironmentContainerPropertiesArgs(description="The trainer's image", tags=tags),
        opts=below,
    )
    return ml.EnvironmentVersion(
        f"{name}-image",
        name=container.name,
        version=pulumi.Output.from_input(run.image).apply(lambda image: _digest([image])),
        resource_group_name=place.group,
        workspace_name=place.workspace,
        properties=ml.EnvironmentVersionPropertiesArgs(
            image=run.image, os_type=ml.OperatingSystemType.LINUX, tags=tags
        ),
        opts=below,
    )


def _properties(
    settings: Settings,
    run: ServiceRun,
    place: Place,
    environment: pulumi.Input[str],
    command: pulumi.Input[str],
) -> ml.CommandJobArgs:
    """One process per machine: the trainer's launcher starts the others, and restarts them."""
    data = ml.UriFolderJobInputArgs(
        job_input_type="uri_folder",
        mode=ml.InputDeliveryMode.READ_ONLY_MOUNT,
        uri=f"azureml://datastores/{DATASETS}/paths/{DATASETS}",
    )
    # For the studio: the trainer writes there by itself, where a mount would lose what a machine had not sent yet.
    checkpoints = ml.UriFolderJobOutputArgs(
        job_output_type="uri_folder",
        mode=ml.OutputDeliveryMode.READ_WRITE_MOUNT,
        uri=f"azureml://datastores/{CHECKPOINTS}/paths/{CHECKPOINTS}/{run.run}",
    )
    # A person may have put a secret there; then Pulumi keeps all of the job as one.
    fabric = node_fabric(settings).env
    own = {name: value if fabric.get(name) == value else pulumi.Output.secret(value) for name, value in run.env.items()}
    variables: dict[str, pulumi.Input[str]] = {**KEYLESS, "AZURE_CLIENT_ID": place.client_id, **own}
    return ml.CommandJobArgs(
        job_type="Command",
        display_name=run.run,
        experiment_name=settings.stack,
        command=command,
        environment_id=environment,
        compute_id=place.compute,
        environment_variables=variables,
        identity=ml.ManagedIdentityArgs(identity_type="Managed", client_id=place.client_id),
        distribution=ml.PyTorchArgs(distribution_type="PyTorch", process_count_per_instance=1),
        resources=ml.JobResourceConfigurationArgs(
            instance_count=run.num_nodes,
            # A quarter of the machine's memory: only what is used counts.
            shm_size=f"{int(settings.instance.memory_gib) // 4}g",
        ),
        inputs={"data": data} if run.reads_data else {},
        outputs={"checkpoints": checkpoints},
        tags=settings.labels,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _workspace_of(job: str) -> str:
    return job.partition("/jobs/")[0]
