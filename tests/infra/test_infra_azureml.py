"""A stack whose job runs on Azure Machine Learning, and the resource that cancels the job before its deletion."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from azure_stack import parse_settings
from loopback import Handler, serve
from provider_mocks.recording import Recording, Registration, record

from infra.clouds.azure import running, service
from infra.clouds.azure.running import RunningJobProvider
from infra.components.one_line_errors import ServiceError

ML = "azure-native:machinelearningservices:"
ON_ML = {"job.launcher": "azureml", "job.image": "azure850f1526.azurecr.io/trainer@sha256:" + "0" * 64}


@pytest.fixture
def made(stack: Callable[..., Recording]) -> Recording:
    """Record a stack with job.launcher azureml."""
    return stack("azure", ON_ML)


def properties(recording: Recording) -> Mapping[str, Any]:
    """Return the properties of the stack's job."""
    inputs: Mapping[str, Any] = recording.one(f"{ML}Job").inputs["properties"]
    return inputs


def test_azureml_creates_no_cluster(made: Recording) -> None:
    kinds = {item.type for item in made.registrations}
    assert not [kind for kind in kinds if kind.startswith(("kubernetes:", "azure-native:containerservice", "pulumi:"))]
    assert not [kind for kind in kinds if kind.startswith("azure-native:netapp")]
    assert "kubeconfig" not in made.exports
    assert made.exports["job"]["launcher"] == "azureml"


def test_nothing_is_public_unless_ranges_are_authorized(made: Recording, stack: Callable[..., Recording]) -> None:
    workspace = made.one(f"{ML}Workspace").inputs
    assert workspace["publicNetworkAccess"] == "Disabled"
    assert made.one(f"{ML}Compute").inputs["properties"]["properties"]["enableNodePublicIp"] is False
    assert made.one("azure-native:storage:StorageAccount").inputs["publicNetworkAccess"] == "Disabled"
    assert made.one("azure-native:keyvault:Vault").inputs["properties"]["networkAcls"]["defaultAction"] == "Deny"
    opened = stack("azure", ON_ML | {"network.authorized_cidrs": ["203.0.113.0/24"]})
    assert opened.one(f"{ML}Workspace").inputs["publicNetworkAccess"] == "Enabled"


@pytest.mark.parametrize(("name", "given"), [("azure", False), ("recommendation-prod", True)])
def test_a_workspace_has_at_most_33_characters_in_its_name(name: str, given: bool) -> None:
    settings = parse_settings({"job": {"launcher": "azureml"}})
    recording = record(lambda: service.serve(name, settings), {}, name)
    assert recording.error is None
    inputs = recording.one(f"{ML}Workspace").inputs
    assert ("workspaceName" in inputs) is given, "another name would replace the workspace of a running stack"
    assert len(inputs.get("workspaceName", f"{name}-ml-workspace00000000")) <= 33


def test_the_workspace_has_an_identity_with_roles_and_exports_its_logs(made: Recording) -> None:
    workspace = made.one(f"{ML}Workspace")
    assert workspace.inputs["identity"]["type"] == "UserAssigned"
    assert workspace.inputs["systemDatastoresAuthMode"] == "Identity", "the account does not accept keys"
    for role in made.of_type("azure-native:authorization:RoleAssignment"):
        if role.name.startswith("azure-ml-"):
            assert made.needs(workspace, role), "without its roles a workspace is not created"
    setting = made.one("azure-native:monitor:DiagnosticSetting").inputs
    assert setting["resourceUri"] == f"{workspace.name}-id"
    assert setting["logs"][0]["enabled"] is True


@pytest.mark.parametrize(("capacity", "priority"), [("on_demand", "Dedicated"), ("spot", "LowPriority")])
def test_the_compute_cluster_scales_with_the_jobs(
    capacity: str, priority: str, stack: Callable[..., Recording]
) -> None:
    recording = stack("azure", ON_ML | {"gpu.capacity": capacity, "gpu.nodes.max": 4, "azureml.idle_minutes": 7})
    compute = recording.one(f"{ML}Compute").inputs["properties"]["properties"]
    assert compute["vmSize"] == "Standard_ND96asr_v4"
    assert compute["vmPriority"] == priority
    scale = compute["scaleSettings"]
    assert (scale["minNodeCount"], scale["maxNodeCount"]) == (0, 4)
    assert scale["nodeIdleTimeBeforeScaleDown"] == "PT7M"


def test_the_job_starts_one_launcher_per_machine(made: Recording) -> None:
    job = properties(made)
    assert job["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
    assert job["resources"]["instanceCount"] == 2
    words = shlex.split(job["command"])
    assert words[:3] == ["exec", "/app/trainer/entrypoint.sh", "launch"]
    assert "--service=auto" in words
    assert "--nproc=8" in words


def test_the_job_uses_the_machines_identity_without_a_key(made: Recording) -> None:
    client = "azure-objects-trainer-client"
    job = properties(made)
    assert job["identity"] == {"identityType": "Managed", "clientId": client}
    variables = made.one(f"{ML}Job").inputs["properties"]["environmentVariables"]
    assert variables["AZURE_CLIENT_ID"] == client
    assert variables["AZURE_STORAGE_ANON"] == "false"
    for store in made.of_type(f"{ML}Datastore"):
        assert store.inputs["properties"]["credentials"] == {"credentialsType": "None"}
    role = made.one("azure-native:authorization:RoleAssignment", "azure-objects-checkpoints")
    assert made.needs(made.one(f"{ML}Job"), role), "a job that starts before its roles fails"


def test_data_is_mounted_only_for_a_run_that_reads_it(made: Recording, stack: Callable[..., Recording]) -> None:
    assert properties(made).get("inputs", {}) == {}, "mounting a missing folder fails"
    reading = properties(stack("azure", ON_ML | {"trainer.data": {"source": "criteo", "path": "/data/criteo"}}))
    assert reading["inputs"]["data"]["uri"] == "azureml://datastores/datasets/paths/datasets"
    assert "--data-at=/data=${{inputs.data}}" in shlex.split(reading["command"])


def test_a_changed_command_replaces_the_job(made: Recording, stack: Callable[..., Recording]) -> None:
    other = stack("azure", ON_ML | {"trainer.train": {"steps": 7}})
    first, second = made.one(f"{ML}Job"), other.one(f"{ML}Job")
    assert first.inputs["id"] != second.inputs["id"], "a job is immutable"
    assert first.inputs["id"].startswith("default-")
    assert second.deleted_first, "two jobs would write the checkpoints of one run"


@pytest.mark.parametrize(
    "overrides",
    [
        {"job.nodes": 1},
        {"job.env": {"NCCL_DEBUG": "INFO"}},
        {"gpu.instance_type": "Standard_ND96amsr_A100_v4"},
        {"job.image": "azure850f1526.azurecr.io/trainer@sha256:" + "1" * 64},
        {"trainer.data": {"source": "criteo", "path": "/data/criteo"}},
    ],
    ids=["machines", "variables", "size", "image", "data"],
)
def test_every_change_of_a_job_changes_its_name(
    overrides: dict[str, object], made: Recording, stack: Callable[..., Recording]
) -> None:
    other = stack("azure", ON_ML | overrides)
    if "job.image" in overrides:
        # The job's name contains the environment's id, which mocks derive from the logical name, not from the version.
        versions = [one.one(f"{ML}EnvironmentVersion").inputs["version"] for one in (made, other)]
        assert versions[0] != versions[1]
    else:
        assert made.one(f"{ML}Job").inputs["id"] != other.one(f"{ML}Job").inputs["id"]


def test_the_users_variables_are_secrets_in_the_state(stack: Callable[..., Recording]) -> None:
    job = stack("azure", ON_ML | {"job.env": {"TOKEN": "hush"}}).one(f"{ML}Job")
    assert "environmentVariables" not in job.inputs["properties"], "a plain value could be read from the state"
    assert job.inputs["properties"]["value"]["environmentVariables"]["TOKEN"] == "hush"


def test_checkpoints_outlive_the_stack_by_default(stack: Callable[..., Recording]) -> None:
    def kept(item: Registration) -> bool:
        return item.retained

    account = "azure-native:storage:StorageAccount"
    assert kept(stack("azure", ON_ML).one(account))
    assert not kept(stack("azure", ON_ML | {"storage.on_destroy": "delete"}).one(account))


def test_every_field_of_the_job_exists_in_the_api(made: Recording) -> None:
    # Pulumi's classes accept any dictionary for a union type.
    from pulumi_azure_native import machinelearningservices as ml

    job = properties(made)
    checked = {
        ml.CommandJobArgs: job,
        ml.PyTorchArgs: job["distribution"],
        ml.ManagedIdentityArgs: job["identity"],
        ml.JobResourceConfigurationArgs: job["resources"],
        ml.UriFolderJobOutputArgs: job["outputs"]["checkpoints"],
        ml.AmlComputeArgs: made.one(f"{ML}Compute").inputs["properties"],
        ml.AmlComputePropertiesArgs: made.one(f"{ML}Compute").inputs["properties"]["properties"],
        ml.ScaleSettingsArgs: made.one(f"{ML}Compute").inputs["properties"]["properties"]["scaleSettings"],
        ml.AzureBlobDatastoreArgs: made.of_type(f"{ML}Datastore")[0].inputs["properties"],
    }
    for kind, body in checked.items():
        allowed = {
            getattr(value.fget, "_pulumi_name", name)
            for name, value in vars(kind).items()
            if isinstance(value, property)
        }
        assert set(body) <= allowed, f"{kind.__name__} has {sorted(allowed)}"


JOB = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w/jobs/default-0"


@dataclass
class Arm:
    """A fake Azure Resource Manager; `states` are those of a job, one per read, None for a missing job."""

    states: list[str | None]
    refusals: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    cancelled: bool = False

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], str]:
        """Handle a request and return status, headers and body."""
        self.asked.append(f"{method} {path}")
        if "api-version=" not in path:
            return 400, {}, '{"error": {"code": "MissingApiVersionParameter"}}'
        if self.refusals:
            return self.refusals.pop(0)
        if method == "POST":
            if self.states[0] in running.ENDED:
                return 400, {}, '{"error": {"code": "UserError", "message": "already in a terminal state"}}'
            self.cancelled = True
            return 202, {}, ""
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            return 404, {}, '{"error": {"code": "NotFound"}}'
        return 200, {}, json.dumps({"id": JOB, "properties": {"jobType": "Command", "status": state}})


class _Token:
    """A credential with the interface of azure-identity."""

    def get_token(self, *_scopes: str, **_options: object) -> Any:
        from azure.core.credentials import AccessToken

        return AccessToken("not-a-real-token", 4_000_000_000)


@contextmanager
def serving(arm: Arm) -> Iterator[str]:
    class ArmHandler(Handler):
        def _serve(self) -> None:
            status, headers, text = arm.answer(self.command, self.path)
            if self.headers.get("Authorization") != "Bearer not-a-real-token":
                status, headers, text = 401, {}, '{"error": {"code": "InvalidAuthenticationToken"}}'
            self.reply(status, text.encode(), headers)

        do_GET = do_POST = _serve

    with serve(ArmHandler) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def no_network(loopback_only: None) -> None:
    """Allow these tests to connect to loopback."""


@pytest.fixture
def delete(monkeypatch: pytest.MonkeyPatch, no_network: None) -> Callable[[Arm], None]:
    """Return a function that deletes the job of a fake resource manager without waits."""
    pytest.importorskip("azure.identity", reason="azure-identity is missing: make install-managed")
    monkeypatch.setattr(running, "credential", _Token)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)

    def run(arm: Arm) -> None:
        with serving(arm) as url:
            RunningJobProvider().delete(JOB, {"endpoint": url, "job": JOB})

    return run


def test_delete_cancels_a_running_job_and_waits_for_its_end(delete: Callable[[Arm], None]) -> None:
    arm = Arm(["Running", "CancelRequested", "CancelRequested", "Canceled"])
    delete(arm)
    assert arm.cancelled
    assert [line.split("?")[0] for line in arm.asked][:2] == [f"GET {JOB}", f"POST {JOB}/cancel"]
    assert len(arm.asked) == 5, "machines are billed until the job has ended"


@pytest.mark.parametrize("state", [*running.ENDED, None])
def test_delete_of_a_job_that_has_ended_or_is_missing_does_nothing(
    state: str | None, delete: Callable[[Arm], None]
) -> None:
    arm = Arm([state])
    delete(arm)
    assert not arm.cancelled


def test_a_job_that_ends_just_before_its_cancellation_is_no_error(delete: Callable[[Arm], None]) -> None:
    arm = Arm(["Running", "Completed"])
    delete(arm)
    assert not arm.cancelled, "the service rejected the cancellation of an ended job"


def test_a_busy_service_is_retried(delete: Callable[[Arm], None]) -> None:
    arm = Arm(["Running", "CancelRequested", "Canceled"], refusals=[(429, {"Retry-After": "1"}, "{}"), (503, {}, "{}")])
    delete(arm)
    assert arm.cancelled


def test_an_error_response_is_reported_on_one_line(delete: Callable[[Arm], None]) -> None:
    arm = Arm(["Running"], refusals=[(403, {}, '{"error":\n{"code": "AuthorizationFailed"}}')])
    with pytest.raises(ServiceError, match=r"returned 403 to GET .*AuthorizationFailed") as caught:
        delete(arm)
    assert "\n" not in str(caught.value)


def test_a_job_that_does_not_end_is_reported_and_stays_in_the_state(
    delete: Callable[[Arm], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_CANCEL_MINUTES", 0)
    with pytest.raises(ServiceError, match="`pulumi destroy` again"):
        delete(Arm(["Running", "CancelRequested"]))


def test_a_job_is_cancelled_before_its_deletion(made: Recording) -> None:
    running_job, job = made.one("pulumi-python:dynamic/azureml:RunningJob"), made.one(f"{ML}Job")
    assert made.needs(running_job, job), "the service rejects the deletion of a running job"
    assert running_job.inputs["job"] == f"{job.name}-id"


def test_another_job_replaces_the_resource() -> None:
    provider = RunningJobProvider()
    assert provider.diff("a", {"job": "a", "endpoint": "e"}, {"job": "b", "endpoint": "e"}).replaces == ["job"]
    moved = provider.diff("a", {"job": "a", "endpoint": "e"}, {"job": "a", "endpoint": "f"})
    assert moved.changes
    assert not moved.replaces
