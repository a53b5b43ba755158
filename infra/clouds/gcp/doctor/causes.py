"""Known problems on Google Cloud: symptom, cause and fix of each. The guide's table is generated from this list."""

from __future__ import annotations

from infra.findings.model import Cause

CREDENTIALS = Cause(
    "gcp-credentials",
    "`could not find default credentials`, `invalid_grant`",
    "there are no application default credentials (separate from gcloud's own login), or they have expired",
    "{login}",
    guide="gcloud auth application-default login",
)
PROJECT = Cause(
    "gcp-project",
    "`Permission denied on resource project`, `project ... not found`",
    "gcp:project is another project's id, a project's name, or a project without access for these credentials",
    "gcloud projects list, then: pulumi config set gcp:project <id>",
)
BILLING = Cause(
    "gcp-billing",
    "`This API method requires billing to be enabled`",
    "the project has no billing account",
    "gcloud billing projects link {project} --billing-account <account>",
    errors=("requires billing to be enabled",),
)
DENIED = Cause(
    "gcp-denied",
    "a check ends with `PERMISSION_DENIED`",
    "these credentials may not read this; the role Viewer on the project is enough",
    "gcloud projects add-iam-policy-binding {project} --member user:<you> --role roles/viewer",
)
UNREACHABLE = Cause(
    "gcp-unreachable",
    "a check ends with `ConnectionError`",
    "this machine has no internet access",
    "behind a proxy set HTTPS_PROXY",
)
SERVICE = Cause(
    "gcp-service",
    "`SERVICE_DISABLED`, `... API has not been used in project ... before or it is disabled`",
    "a new project has no services enabled; one that `up` has just enabled may refuse requests for some minutes",
    "gcloud services enable {services} --project {project}, then up again",
    errors=("SERVICE_DISABLED", "has not been used in project"),
)
VERSION = Cause(
    "gcp-version",
    "`Master version ... is unsupported`",
    "the Regular channel of this location does not have cluster.kubernetes_version, or no longer",
    "pulumi config set --path cluster.kubernetes_version {version}",
)
DRIVER = Cause(
    "gcp-driver",
    "`libcuda.so.1: cannot open shared object file` on a node with GPUs",
    "the image does not look for the driver in /usr/local/nvidia/lib64, where GKE mounts it",
    "build it again from trainer/Dockerfile, or set LD_LIBRARY_PATH=/usr/local/nvidia/lib64 in yours",
    errors=("libcuda.so.1",),
)
MAINTENANCE = Cause(
    "gcp-maintenance",
    "nodes are drained one by one, and `kubectl get nodes` shows another version",
    "GKE upgrades nodes in the weekly window of the section maintenance; the run resumes from its checkpoint",
    "maintenance.exclusions for the days of a run, or: pulumi config set --path maintenance.automatic false",
)
OFFER = Cause(
    "gcp-offer",
    "`Machine type ... does not exist in zone ...`",
    "the zone does not have this machine type",
    "{fix}",
    guide="pulumi config set gcp:zone <zone>; python -m infra doctor names the zones that have it",
)
QUOTA = Cause(
    "gcp-quota",
    "`GCE quota exceeded: NVIDIA_..._GPUS`; the pool stays at its size",
    "the project's quota of this GPU in the region is too small; a new project often has 0, and 0 of all GPUs",
    "request {value} of {metric}: https://console.cloud.google.com/iam-admin/quotas?project={project}"
    ", or fewer nodes: pulumi config set --path gpu.nodes.max {nodes}",
    errors=("GCE quota exceeded", "QUOTA_EXCEEDED"),
)
CAPACITY = Cause(
    "gcp-capacity",
    "`ZONE_RESOURCE_POOL_EXHAUSTED` or `GCE out of resources` although the quota is large enough",
    "no such machine is free in the zone at present; a quota does not guarantee capacity",
    "another zone, gpu.capacity flex_start, which waits in a queue, or a reservation",
    errors=("ZONE_RESOURCE_POOL_EXHAUSTED", "GCE out of resources", "GCE_STOCKOUT"),
)
RESERVATION = Cause(
    "gcp-reservation",
    "`Reservation ... does not exist`, or nodes that never start",
    "the reservation was deleted, is not ready, is full, or has another machine type",
    "{fix}",
    guide="gcloud compute reservations list, then set gpu.reservation_id and gpu.nodes.desired to match",
)
KEY_GRANT = Cause(
    "gcp-key-grant",
    "the cluster is refused with `cloudkms.cryptoKeyVersions.useToEncrypt` denied",
    "GKE's grant on the key of Kubernetes secrets has not arrived; Google allows seven minutes and more",
    "pulumi up",
    errors=("cloudkms.cryptoKeyVersions.useToEncrypt", "cloudkms.cryptoKeyVersions.useToDecrypt"),
)
BUCKET = Cause(
    "gcp-bucket",
    "the trainer exits with `403` or `404` for its bucket",
    "the bucket was deleted or belongs to another project",
    "gcloud storage buckets describe gs://{bucket}; recreate it: python -m infra refresh --stack {stack}, then up",
)
PLUGIN = Cause(
    "gcp-auth-plugin",
    "`executable gke-gcloud-auth-plugin not found`",
    "the kubeconfig gets its token from a plug-in of gcloud, which is installed separately",
    "gcloud components install gke-gcloud-auth-plugin (or the package google-cloud-cli-gke-gcloud-auth-plugin)",
    errors=("gke-gcloud-auth-plugin not found",),
)
EXISTING_NETWORK = Cause(
    "gcp-existing-network",
    "with `network.existing`: nodes never join the cluster, `IP_SPACE_EXHAUSTED`, or Filestore has no range",
    "the subnet lacks Cloud NAT, Private Google Access, a secondary range or free addresses, or the VPC its connection"
    " for services",
    "{fix}",
    guide="python -m infra doctor names what is missing and the `gcloud` command for each",
    errors=("IP_SPACE_EXHAUSTED",),
)
CAUSES = (
    CREDENTIALS, PROJECT, BILLING, DENIED, UNREACHABLE, SERVICE, PLUGIN, VERSION,
    DRIVER, MAINTENANCE, OFFER, QUOTA, CAPACITY, RESERVATION, KEY_GRANT, BUCKET,
    EXISTING_NETWORK,
)  # fmt: skip
