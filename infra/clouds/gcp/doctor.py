"""What Google Cloud says before anything is made: project, billing, services, machine types, quota, reservation."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from infra.clouds.gcp import causes
from infra.clouds.gcp.causes import (
    BILLING,
    BUCKET,
    CREDENTIALS,
    DENIED,
    OFFER,
    PLUGIN,
    PROJECT,
    QUOTA,
    RESERVATION,
    SERVICE,
    UNREACHABLE,
)
from infra.clouds.gcp.credentials import LOGIN
from infra.clouds.gcp.settings import NUM_FABRIC_NETWORKS, Settings
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import Check, Context, Finding, QueryFailedError, ok, problem, skipped

PACKAGES = ("pulumi-gcp",)
#: The services that are asked, by the first part of their names; a test puts its own addresses here.
ENDPOINTS: Mapping[str, str] = {
    name: f"https://{name}.googleapis.com"
    for name in ("compute", "serviceusage", "cloudresourcemanager", "cloudbilling", "storage", "oauth2")
}


#: What `up` cannot switch on by itself, and what the questions below are asked of.
_BEFORE = ("cloudresourcemanager", "serviceusage", "compute")
_GPUS = {"a2-highgpu": "NVIDIA_A100_GPUS", "a2-ultragpu": "NVIDIA_A100_80GB_GPUS", "a3-highgpu": "NVIDIA_H100_GPUS"}
_GPUS |= {"g2-standard": "NVIDIA_L4_GPUS"}
_ALL_GPUS = "GPUS_ALL_REGIONS"
_REGISTRY = re.compile(r"^[a-z0-9-]+-docker\.pkg\.dev$|^([a-z]+\.)?gcr\.io$")
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
WHO = "credentials"
CAUSES = causes.CAUSES


class ApiError(Exception):
    """An answer that is an error, with the service's own status and reason."""

    def __init__(self, code: int, status: str, message: str, reasons: Sequence[str]) -> None:
        self.code, self.status, self.reasons = code, status, reasons
        super().__init__(message)


class Rest:
    """Google's APIs, read only, as the application default credentials."""

    def __init__(self) -> None:
        import google.auth
        from google.auth.transport.requests import AuthorizedSession

        self.credentials, _ = google.auth.default(scopes=_SCOPES)
        session: Any = AuthorizedSession  # without types
        self._session = session(self.credentials)

    def get(self, service: str, path: str, **query: str) -> Mapping[str, Any]:
        """One answer; ApiError where it is an error."""
        response = self._session.get(f"{ENDPOINTS[service]}/{path}", params=query, timeout=20)
        if response.status_code >= 400:  # HTTP: every error
            raise _api_error(response)
        found: Mapping[str, Any] = response.json()
        return found

    def listed(self, service: str, path: str, key: str, **query: str) -> Iterator[Any]:
        """Every entry of a list, page after page; of an aggregated list its parts."""
        token = ""
        while True:
            page = self.get(service, path, **query, **({"pageToken": token} if token else {}))
            found = page.get(key) or []
            yield from found.items() if isinstance(found, dict) else found
            token = page.get("nextPageToken", "")
            if not token:
                return


def checks(context: Context) -> list[Check]:
    """Every question, the first being who asks."""
    settings = context.settings
    assert isinstance(settings, Settings)
    opened: list[Questions] = []

    def who() -> Finding:
        opened.append(Questions(Rest(), settings, context))
        return opened[0].credentials()

    asked = {
        "billing": Questions.billing,
        "services": Questions.services,
        "machine type": Questions.offer,
        "quota": Questions.quota,
        "reservation": Questions.reservation,
        "bucket": Questions.bucket,
    }
    later = [Check(name, partial(_later, run, opened, settings), WHO) for name, run in asked.items()]
    plugin = [] if settings.service else [Check("auth plug-in", auth_plugin)]
    return [Check(WHO, partial(_asking, who, settings)), *later, *plugin]


def devices(_: Settings) -> Mapping[str, int]:
    """None: Fast Socket and TCPX use network cards that a pod gets by its annotations."""
    return {}


def login(context: Context, host: str) -> tuple[str, str] | None:
    """An access token, under the name that Artifact Registry gives it."""
    if not _REGISTRY.match(host):
        return None

    def token() -> tuple[str, str]:
        from google.auth.transport.requests import Request

        credentials: Any = Rest().credentials
        credentials.refresh(Request())
        return "oauth2accesstoken", str(credentials.token)

    assert isinstance(context.settings, Settings)
    try:
        return token()
    except Exception as error:
        raise _explained(error, context.settings) from None


@dataclass(frozen=True)
class Questions:
    """What is asked about one stack."""

    rest: Rest
    settings: Settings
    context: Context

    def credentials(self) -> Finding:
        """The project: that it is there, and active."""
        project = self.settings.gcp_project
        who = getattr(self.rest.credentials, "service_account_email", "") or "the application default credentials"
        try:
            found = self.rest.get("cloudresourcemanager", f"v1/projects/{project}")
        except ApiError as error:
            if error.code == 404 or (
                error.code == 403 and "SERVICE_DISABLED" not in error.reasons
            ):  # HTTP: none, forbidden
                return problem(PROJECT, f"{project}: {error}")
            raise
        told = f"project {project} (number {found['projectNumber']}), {found['lifecycleState']}, as {who}"
        return ok(told) if found["lifecycleState"] == "ACTIVE" else problem(PROJECT, told)

    def billing(self) -> Finding:
        """Somebody pays."""
        found = self.rest.get("cloudbilling", f"v1/projects/{self.settings.gcp_project}/billingInfo")
        if found.get("billingEnabled"):
            return ok(f"paid by {found.get('billingAccountName', '').removeprefix('billingAccounts/')}")
        return problem(BILLING, "no billing account", project=self.settings.gcp_project)

    def services(self) -> Finding:
        """The services that must be on before `up`."""
        on = {
            str(item["config"]["name"]).partition(".")[0]
            for item in self.rest.listed(
                "serviceusage",
                f"v1/projects/{self.settings.gcp_project}/services",
                "services",
                filter="state:ENABLED",
                pageSize="200",
            )
        }
        missing = [f"{name}.googleapis.com" for name in _BEFORE if name not in on]
        if missing:
            values = {"services": " ".join(missing), "project": self.settings.gcp_project}
            return problem(SERVICE, f"off: {', '.join(missing)}", **values)
        return ok(f"{len(on)} on; `up` switches on what else it needs")

    def offer(self) -> Finding:
        """The zone has the machine type."""
        kind, project = self.settings.gpu.instance_type, self.settings.gcp_project
        try:
            found = self.rest.get(
                "compute", f"compute/v1/projects/{project}/zones/{self.settings.zone}/machineTypes/{kind}"
            )
        except ApiError as error:
            if error.code != 404:  # HTTP: not found
                raise
            pages = self.rest.listed(
                "compute", f"compute/v1/projects/{project}/aggregated/machineTypes", "items", filter=f"name={kind}"
            )
            zones = sorted(name.removeprefix("zones/") for name, part in pages if part.get("machineTypes"))
            near = [zone for zone in zones if zone.startswith(self.settings.region + "-")]
            if near:
                fix = f"pulumi config set gcp:zone {near[0]}"
            elif zones:
                fix = f"pulumi config set gcp:region {zones[0][:-2]}; pulumi config set gcp:zone {zones[0]}"
            else:
                fix = "another type: python -m infra instances"
            return problem(OFFER, f"{self.settings.zone} has no {kind}; {', '.join(zones) or 'no zone'} do", fix=fix)
        return ok(f"{kind} in {self.settings.zone}: {found['guestCpus']} vCPUs, {found['memoryMb'] // 1024} GiB")

    def quota(self) -> Finding | list[Finding]:
        """GPUs of the model in the region, GPUs of all models everywhere, and networks."""
        if self.settings.service:
            return skipped("Vertex AI has quotas of its own (custom_model_training_...): IAM & Admin > Quotas")
        gpu, project = self.settings.gpu, self.settings.gcp_project
        if gpu.capacity == "reservation":
            return skipped("nodes of a reservation were counted when it was made")
        metric = _GPUS.get(gpu.instance_type.rpartition("-")[0])
        if metric is None:
            return skipped(f"no quota is known for {gpu.instance_type}")
        # Flex-start takes from the quota of preemptible GPUs as spot does.
        metric = f"PREEMPTIBLE_{metric}" if gpu.capacity in ("spot", "flex_start") else metric
        of_region = _quotas(self.rest.get("compute", f"compute/v1/projects/{project}/regions/{self.settings.region}"))
        of_project = _quotas(self.rest.get("compute", f"compute/v1/projects/{project}"))
        needed = gpu.nodes.max * self.settings.gpus_per_node
        wanted = [(metric, of_region, needed), (_ALL_GPUS, of_project, needed)]
        if not self.context.outputs:
            wanted.append(("NETWORKS", of_project, 1 + (NUM_FABRIC_NETWORKS if self.settings.tcpx else 0)))
        own = gpu.nodes.min * self.settings.gpus_per_node if self.context.outputs else 0
        found = []
        for name, table, count in wanted:
            limit, used = table.get(name, (0.0, 0.0))
            used = max(0.0, used - own) if name != "NETWORKS" else used
            told = f"{name}: {limit:g}, {used:g} in use, {count} needed"
            if used + count <= limit:
                found.append(ok(told))
            else:
                nodes = max(0, int(limit - used) // max(1, self.settings.gpus_per_node))
                values = {"value": f"{used + count:g}", "metric": name, "project": project, "nodes": nodes}
                found.append(problem(QUOTA, told, **values))
        return found

    def reservation(self) -> Finding:
        """The reservation is ready, of this type, and has room."""
        named, gpu = self.settings.gpu.reservation_id, self.settings.gpu
        if not named:
            return skipped(f"gpu.capacity is {gpu.capacity}")
        project = named.split("/")[1] if named.startswith("projects/") else self.settings.gcp_project
        name = named.rpartition("/")[2]
        choose = "pulumi config set --path gpu.reservation_id <name>; gcloud compute reservations list"
        try:
            found = self.rest.get(
                "compute", f"compute/v1/projects/{project}/zones/{self.settings.zone}/reservations/{name}"
            )
        except ApiError as error:
            if error.code != 404:  # HTTP: not found
                raise
            return problem(RESERVATION, f"no reservation {name} in {self.settings.zone} of {project}", fix=choose)
        held = found["specificReservation"]
        kind, free = held["instanceProperties"]["machineType"], int(held["count"]) - int(held.get("inUseCount", 0))
        told = f"{name}: {found['status']}, {free} of {held['count']} {kind} free"
        if found["status"] != "READY" or kind != gpu.instance_type:
            return problem(RESERVATION, told, fix=choose)
        if not self.context.outputs and free < gpu.nodes.desired:
            return problem(RESERVATION, told, fix=f"pulumi config set --path gpu.nodes.desired {free}; or {choose}")
        return ok(told)

    def bucket(self) -> Finding:
        """The bucket of checkpoints, once it is there. Pulumi draws the end of its name, so none can be taken."""
        if not self.context.outputs:
            return skipped("`up` draws the name, so that nobody can have it")
        name = str(self.context.outputs["bucket_uri"]).removeprefix("gs://")
        try:
            found = self.rest.get("storage", f"storage/v1/b/{name}")
        except ApiError as error:
            if error.code not in (403, 404):  # HTTP: forbidden, not found
                raise
            return problem(BUCKET, f"gs://{name}: {error}", bucket=name, stack=self.context.stack)
        return ok(f"gs://{name} is there, in {found['location']}")


def _quotas(found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Limit and usage by metric."""
    return {str(item["metric"]): (float(item["limit"]), float(item["usage"])) for item in found.get("quotas", ())}


def auth_plugin() -> Finding:
    """What the kubeconfig calls for a token."""
    found = shutil.which("gke-gcloud-auth-plugin")
    return ok(found) if found else problem(PLUGIN, "no `gke-gcloud-auth-plugin` on PATH")


def _later(
    run: Callable[[Questions], Finding | list[Finding]], opened: Sequence[Questions], settings: Settings
) -> Finding | list[Finding]:
    return _asking(lambda: run(opened[0]), settings)


def _asking(run: Callable[[], Finding | list[Finding]], settings: Settings) -> Finding | list[Finding]:
    try:
        return run()
    except Exception as error:
        raise _explained(error, settings) from None


def _api_error(response: Any) -> ApiError:
    """https://cloud.google.com/apis/design/errors; Compute's older form lists `errors` instead of `details`."""
    try:
        body = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return ApiError(response.status_code, "", " ".join(response.text.split())[:200], ())
    reasons = [str(item.get("reason")) for item in (*body.get("details", ()), *body.get("errors", ()))]
    message = " ".join(str(body.get("message", "")).split())[:300]
    return ApiError(response.status_code, str(body.get("status", "")), message, reasons)


def _explained(error: Exception, settings: Settings) -> Exception:
    """What the client raises as a row with its cause; anything else as it is."""
    project = settings.gcp_project
    if isinstance(error, ModuleNotFoundError):
        return QueryFailedError(NO_CLIENT, f"the Python package {error.name} is missing")
    if isinstance(error, ApiError):
        if error.code == 429 or error.code >= 500:  # HTTP: too many requests, its own fault
            return QueryFailedError(SLOW, f"{error.code} {error}")
        if {"SERVICE_DISABLED", "accessNotConfigured"} & set(error.reasons):
            match = re.search(r"(\w+\.googleapis\.com)", str(error))
            name = match[1] if match else "compute.googleapis.com"
            return QueryFailedError(SERVICE, str(error), services=name, project=project)
        if error.code == 403:  # HTTP: forbidden
            return QueryFailedError(DENIED, str(error), project=project)
        if error.code == 401:  # HTTP: unauthorised
            return QueryFailedError(CREDENTIALS, str(error), is_problem=True, login=LOGIN)
        return error
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    told = " ".join(str(error).split())[:300]
    if isinstance(error, GoogleAuthError):
        return QueryFailedError(CREDENTIALS, told, is_problem=True, login=LOGIN)
    if isinstance(error, RequestException):
        return QueryFailedError(UNREACHABLE, told)
    return error
