"""What the doctor asks Google Cloud about one stack; each method returns one row of the result."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from infra.clouds.gcp.credentials import CLUSTER_APIS, JOB_APIS
from infra.clouds.gcp.doctor import networks
from infra.clouds.gcp.doctor.causes import (
    BILLING,
    BUCKET,
    OFFER,
    PLUGIN,
    PROJECT,
    QUOTA,
    RESERVATION,
    SERVICE,
    VERSION,
)
from infra.clouds.gcp.doctor.client import ApiError, Rest
from infra.clouds.gcp.settings import NUM_FABRIC_NETWORKS, Settings
from infra.clouds.gcp.versions import CHANNEL, END_OF_SUPPORT
from infra.findings.model import Context, Finding, ok, problem, skipped

#: Services that these queries use, and with which `up` enables others.
_REQUIRED_SERVICES = ("cloudresourcemanager", "serviceusage", "compute")
#: GPU quotas by family of machine types.
_GPU_QUOTAS = {
    "a2-highgpu": "NVIDIA_A100_GPUS",
    "a2-ultragpu": "NVIDIA_A100_80GB_GPUS",
    "a3-highgpu": "NVIDIA_H100_GPUS",
    "g2-standard": "NVIDIA_L4_GPUS",
}
_ALL_GPUS_QUOTA = "GPUS_ALL_REGIONS"


@dataclass(frozen=True)
class Queries:
    """The queries about one stack."""

    rest: Rest
    settings: Settings
    context: Context

    def credentials(self) -> Finding:
        """Check that the project exists and is active."""
        project = self.settings.gcp_project
        user = getattr(self.rest.credentials, "service_account_email", "") or "the application default credentials"
        try:
            description = self.rest.get("cloudresourcemanager", f"v1/projects/{project}")
        except ApiError as error:
            no_access = error.code == HTTPStatus.FORBIDDEN and "SERVICE_DISABLED" not in error.reasons
            if no_access or error.code == HTTPStatus.NOT_FOUND:
                return problem(PROJECT, f"{project}: {error}")
            raise
        state = description["lifecycleState"]
        result = f"project {project} (number {description['projectNumber']}), {state}, as {user}"
        return ok(result) if state == "ACTIVE" else problem(PROJECT, result)

    def billing(self) -> Finding:
        """Check that the project has a billing account."""
        billing = self.rest.get("cloudbilling", f"v1/projects/{self.settings.gcp_project}/billingInfo")
        if billing.get("billingEnabled"):
            return ok(f"billed to {billing.get('billingAccountName', '').removeprefix('billingAccounts/')}")
        return problem(BILLING, "no billing account", project=self.settings.gcp_project)

    def services(self) -> Finding:
        """Check that all services are enabled, some minutes before `up` needs them.

        A service that was enabled a moment ago may refuse requests:
        https://registry.terraform.io/providers/hashicorp/google/latest/docs/guides/google_project_service
        """
        enabled = {
            str(item["config"]["name"]).partition(".")[0]
            for item in self.rest.list_all(
                "serviceusage",
                f"v1/projects/{self.settings.gcp_project}/services",
                "services",
                filter="state:ENABLED",
                pageSize="200",
            )
        }
        used = JOB_APIS if self.settings.service else CLUSTER_APIS
        needed = sorted({*_REQUIRED_SERVICES, *used})
        missing = [f"{name}.googleapis.com" for name in needed if name not in enabled]
        if missing:
            values = {"services": " ".join(missing), "project": self.settings.gcp_project}
            return problem(SERVICE, f"disabled: {', '.join(missing)}", **values)
        return ok(f"{len(enabled)} enabled")

    def version(self) -> Finding:
        """Check that GKE offers the Kubernetes version to new clusters; a running cluster keeps its own."""
        lowest, location = self.settings.cluster.kubernetes_version, self.settings.cluster_location
        if self.settings.service or self.context.outputs:
            return skipped("Vertex AI has no cluster" if self.settings.service else "the cluster exists")
        path = f"v1/projects/{self.settings.gcp_project}/locations/{location}/serverConfig"
        channels = {item["channel"]: item for item in self.rest.get("container", path).get("channels", ())}
        patches = [str(version) for version in channels.get(CHANNEL, {}).get("validVersions", ())]
        minors = sorted({patch.rpartition("-")[0].rpartition(".")[0] for patch in patches})
        result = f"{CHANNEL} in {location}: {', '.join(minors) or 'no version'}"
        if lowest in minors:
            return ok(result)
        offered = [minor for minor in minors if minor in END_OF_SUPPORT]
        return problem(VERSION, result, version=offered[-1] if offered else "<version>")

    def offer(self) -> Finding:
        """Check that the zone offers the machine type."""
        kind, project = self.settings.gpu.instance_type, self.settings.gcp_project
        try:
            machine = self.rest.get(
                "compute", f"compute/v1/projects/{project}/zones/{self.settings.zone}/machineTypes/{kind}"
            )
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return self._offer_elsewhere(kind)
        return ok(f"{kind} in {self.settings.zone}: {machine['guestCpus']} vCPUs, {machine['memoryMb'] // 1024} GiB")

    def _offer_elsewhere(self, kind: str) -> Finding:
        """Return the problem of a zone without the machine type, with a zone that has it."""
        pages = self.rest.list_all(
            "compute",
            f"compute/v1/projects/{self.settings.gcp_project}/aggregated/machineTypes",
            "items",
            filter=f"name={kind}",
        )
        zones = sorted(name.removeprefix("zones/") for name, part in pages if part.get("machineTypes"))
        of_region = [zone for zone in zones if zone.startswith(self.settings.region + "-")]
        if of_region:
            fix = f"pulumi config set gcp:zone {of_region[0]}"
        elif zones:
            fix = f"pulumi config set gcp:region {zones[0][:-2]}; pulumi config set gcp:zone {zones[0]}"
        else:
            fix = "another type: python -m infra instances"
        return problem(OFFER, f"{self.settings.zone} has no {kind}; {', '.join(zones) or 'no zone'} do", fix=fix)

    def quota(self) -> Finding | list[Finding]:
        """Check the quotas of the GPU model in the region, of all GPUs, and of networks."""
        if self.settings.service:
            return skipped("Vertex AI has its own quotas (custom_model_training_...): see IAM & Admin > Quotas")
        gpu, project = self.settings.gpu, self.settings.gcp_project
        if gpu.capacity == "reservation":
            return skipped("a reservation's nodes count against the quota since its creation")
        metric = _GPU_QUOTAS.get(gpu.instance_type.rpartition("-")[0])
        if metric is None:
            return skipped(f"no quota is known for {gpu.instance_type}")
        # Flex-start uses the quota of preemptible GPUs, as spot does.
        metric = f"PREEMPTIBLE_{metric}" if gpu.capacity in ("spot", "flex_start") else metric
        of_region = _quotas(self.rest.get("compute", f"compute/v1/projects/{project}/regions/{self.settings.region}"))
        of_project = _quotas(self.rest.get("compute", f"compute/v1/projects/{project}"))
        needed = gpu.nodes.max * self.settings.gpus_per_node
        requests = [(metric, of_region, needed), (_ALL_GPUS_QUOTA, of_project, needed)]
        num_networks = int(self.settings.network.existing is None) + (NUM_FABRIC_NETWORKS if self.settings.tcpx else 0)
        if num_networks and not self.context.outputs:
            requests.append(("NETWORKS", of_project, num_networks))
        own = gpu.nodes.min * self.settings.gpus_per_node if self.context.outputs else 0
        findings = []
        for name, table, count in requests:
            limit, used = table.get(name, (0.0, 0.0))
            used = max(0.0, used - own) if name != "NETWORKS" else used
            result = f"{name}: {limit:g}, {used:g} in use, {count} needed"
            if used + count <= limit:
                findings.append(ok(result))
            else:
                nodes = max(0, int(limit - used) // max(1, self.settings.gpus_per_node))
                values = {"value": f"{used + count:g}", "metric": name, "project": project, "nodes": nodes}
                findings.append(problem(QUOTA, result, **values))
        return findings

    def reservation(self) -> Finding:
        """Check that the reservation is ready, has this machine type and enough free nodes."""
        path, gpu = self.settings.gpu.reservation_id, self.settings.gpu
        if not path:
            return skipped(f"gpu.capacity is {gpu.capacity}")
        project = path.split("/")[1] if path.startswith("projects/") else self.settings.gcp_project
        name = path.rpartition("/")[2]
        choose = "pulumi config set --path gpu.reservation_id <name>; gcloud compute reservations list"
        try:
            reservation = self.rest.get(
                "compute", f"compute/v1/projects/{project}/zones/{self.settings.zone}/reservations/{name}"
            )
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            return problem(RESERVATION, f"no reservation {name} in {self.settings.zone} of {project}", fix=choose)
        nodes = reservation["specificReservation"]
        kind, free = nodes["instanceProperties"]["machineType"], int(nodes["count"]) - int(nodes.get("inUseCount", 0))
        result = f"{name}: {reservation['status']}, {free} of {nodes['count']} {kind} free"
        if reservation["status"] != "READY" or kind != gpu.instance_type:
            return problem(RESERVATION, result, fix=choose)
        if not self.context.outputs and free < gpu.nodes.desired:
            return problem(RESERVATION, result, fix=f"pulumi config set --path gpu.nodes.desired {free}; or {choose}")
        return ok(result)

    def existing_network(self) -> Finding | list[Finding]:
        """Check the network that the stack uses and does not create."""
        return networks.existing_network(self.rest, self.settings, is_up=bool(self.context.outputs))

    def bucket(self) -> Finding:
        """Check that the checkpoint bucket exists; before `up` its name, which has a random suffix, is not known."""
        if not self.context.outputs:
            return skipped("`up` chooses an unused name")
        name = str(self.context.outputs["bucket_uri"]).removeprefix("gs://")
        try:
            bucket = self.rest.get("storage", f"storage/v1/b/{name}")
        except ApiError as error:
            if error.code not in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
                raise
            return problem(BUCKET, f"gs://{name}: {error}", bucket=name, stack=self.context.stack)
        return ok(f"gs://{name} exists, in {bucket['location']}")


def _quotas(description: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return limit and usage by metric of a project or a region."""
    return {str(item["metric"]): (float(item["limit"]), float(item["usage"])) for item in description.get("quotas", ())}


def auth_plugin() -> Finding:
    """Check for the plug-in that the kubeconfig runs to get a token."""
    path = shutil.which("gke-gcloud-auth-plugin")
    return ok(path) if path else problem(PLUGIN, "no `gke-gcloud-auth-plugin` on PATH")
