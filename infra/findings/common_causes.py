"""Causes that all clouds share: tools, settings, images, the cluster and the job."""

from __future__ import annotations

from infra.findings.model import Cause

SLOW = Cause(
    "slow",
    "a check ends with `no answer in ... s`, or with status 429 or 5xx",
    "a proxy or a firewall drops the request, or the service is down or overloaded",
    "try again with --timeout 120; behind a proxy set HTTPS_PROXY",
)
BROKEN = Cause(
    "broken",
    "a check ends with the name of a Python error",
    "the check itself failed on a response of an unknown format",
    "open an issue with the output of --json",
)
NO_ENGINE = Cause(
    "pulumi-cli",
    "`no pulumi on PATH`, or an unsupported version",
    "the engine is not installed, or too old to stream its events",
    "{install}",
    guide="https://www.pulumi.com/docs/install, the version that requirements.txt pins or newer",
)
NO_LANGUAGE = Cause(
    "pulumi-python",
    "`failed to load language plugin python`",
    "the engine starts Python through pulumi-language-python, which must be installed in the same folder or on PATH",
    "{install}",
    guide="https://www.pulumi.com/docs/install: unpack the whole archive, not only the command",
)
PYTHON = Cause(
    "python",
    "`SyntaxError`, or packages without wheels",
    "the pinned packages do not support this version of Python",
    "make PYTHON=python3.12 install-infra",
)
PACKAGES_DIFFER = Cause(
    "lock",
    "`ModuleNotFoundError`, or a preview with changes that no setting explains",
    "the installed packages differ from requirements.txt: other SDK versions have other inputs",
    "make install-infra, then run .venv/bin/python",
)
STATE = Cause(
    "state",
    "`pulumi` asks for a login or a passphrase, or the stack is locked",
    "the state backend cannot be read with the credentials of this shell",
    "{fix}",
    guide="pulumi login; export PULUMI_CONFIG_PASSPHRASE=...; to remove a stale lock: pulumi cancel --stack <stack>",
)
SETTING = Cause(
    "settings",
    "`... settings to fix`",
    "a key of Pulumi.<stack>.yaml has a value that is not allowed",
    "{fix}",
    guide="run the command of each line: pulumi config set --path <key> <value>",
)
BUDGET = Cause(
    "budget",
    "preview ends with `the stack costs ... USD per hour at gpu.nodes.max`",
    "the pool at its maximum costs more than budget.max_usd_per_hour",
    "{fix}, or fewer nodes: pulumi config set --path gpu.nodes.max N",
    guide="pulumi config set --path budget.max_usd_per_hour <usd>, or fewer nodes: --path gpu.nodes.max N",
)
NO_BUILDER = Cause(
    "image-builder",
    "`up` fails at the image with `failed to connect to the docker API`",
    "BuildKit builds the image on this machine, and no Docker daemon responds",
    "start Docker, or use an existing image: pulumi config set --path job.image <image>@sha256:...",
    errors=("failed to connect to the docker API", "Cannot connect to the Docker daemon"),
)
NO_IMAGE = Cause(
    "image-missing",
    "pods stay in ImagePullBackOff",
    "the image of job.image is not in the registry",
    "push it, or correct the name: pulumi config set --path job.image {image}",
)
IMAGE_CLOSED = Cause(
    "image-closed",
    "`unauthorized` or `denied` from the registry",
    "these credentials may not read the image; the nodes may still be allowed to pull it",
    "docker login {host}, or use the stack's own registry: pulumi config rm --path job.image",
)
IMAGE_PUSH = Cause(
    "image-push",
    "`up` fails at the image with `401 Unauthorized` or `authentication required`",
    "the registry refuses the push: the login has expired, or its account has no role on the registry",
    "log in to the cloud again, then: python -m infra up --stack <stack>, which gets a new token for the registry",
    errors=("401 Unauthorized", "authentication required"),
)
IMAGE_IMMUTABLE = Cause(
    "image-immutable",
    "`up` fails at the image with `already exists in the ... repository and cannot be overwritten`",
    "the registry's tags are immutable, and the image was built again under the same tag",
    "use the image that exists: pulumi config set --path job.image <repository>@sha256:<digest>",
    errors=("cannot be overwritten because",),
)
API_CLOSED = Cause(
    "api-unreachable",
    "`dial tcp ...: i/o timeout` from kubectl and from `up`",
    "the Kubernetes API is private, or network.authorized_cidrs lacks this machine's address",
    "pulumi config set --path 'network.authorized_cidrs[0]' \"$(curl -s https://checkip.amazonaws.com)/32\", then up; "
    "or work inside the network",
    errors=("configured Kubernetes cluster is unreachable", ": i/o timeout"),
)
API_LOGIN = Cause(
    "api-login",
    "`You must be logged in to the server`",
    "the kubeconfig's command got no token, or its account has no role in the cluster",
    "{login}",
    guide="log in to the cloud again; if that does not help, ask an administrator of the cluster for access",
    errors=("You must be logged in to the server",),
)
API_FORBIDDEN = Cause(
    "api-forbidden",
    "`... is forbidden: User ... cannot list resource`",
    "these credentials may use the cluster, but not list this resource",
    "ask the cluster's owner for a role that may list {what}",
)
NODE_NOT_READY = Cause(
    "node-not-ready",
    "`kubectl get nodes` shows NotReady",
    "the node's kubelet does not report, or its network add-on is missing",
    "kubectl describe node {node}; if it stays NotReady: kubectl delete node {node}, and the pool replaces it",
)
NO_GPUS = Cause(
    "gpus-missing",
    "pods wait with `Insufficient nvidia.com/gpu` although the nodes exist",
    "the driver or the device plug-in does not run on the node, or a GPU has failed",
    "kubectl get pods --all-namespaces --field-selector spec.nodeName={node}: check the device plug-in and the driver",
)
NO_FABRIC = Cause(
    "fabric-missing",
    "pods wait with `Insufficient` fabric devices, or NCCL falls back to TCP",
    "the fabric's device plug-in does not run on the node, or the node has no such card",
    "kubectl describe node {node} | grep {device}, and read the logs of the fabric's plug-in",
)
LOCKED_MEMORY = Cause(
    "locked-memory",
    "netcheck or the training ends with `RDMA cannot register memory`",
    "the node runs with the limit of an earlier version, or something changed the pod's user or capability",
    "python -m infra up --stack {stack}, which replaces the nodes or the job; see Locked memory in workloads/README.md",
    errors=("RDMA cannot register memory",),
)
CLAIM = Cause(
    "storage-unbound",
    "pods wait with `pod has unbound immediate PersistentVolumeClaims`",
    "the claim of the shared storage found no volume, or its class has no provisioner",
    "kubectl --namespace {namespace} describe pvc {claim}",
)
MOUNT = Cause(
    "storage-mount",
    "pods stay in ContainerCreating with FailedMount",
    "the node cannot reach the file system, or has no driver for it",
    "kubectl --namespace {namespace} describe pod {pod}: its events show the reason",
    errors=("FailedMount",),
)
OPERATOR = Cause(
    "operator",
    "jobs without pods, or nodes without GPUs or devices",
    "the pods of an operator do not run",
    "kubectl --namespace {namespace} describe {kind} {name}, then: python -m infra up --stack {stack}",
    errors=("timed out waiting for the condition", "context deadline exceeded"),
)
JOB = Cause(
    "job",
    "the run makes no progress",
    "its job or one of its pods waits or has failed",
    "python -m workloads status --stack {stack}",
)
JOB_LOG = Cause(
    "job-log",
    "the trainer ends with an error",
    "the log shows the error",
    "python -m workloads logs --stack {stack} --pod {pod}",
)
NO_CLIENT = Cause(
    "client-missing",
    "a check ends with `the Python package ... is missing`",
    "the Python clients of the clouds are optional: only the doctor uses them",
    "make install-doctor",
)

GENERAL = (
    NO_ENGINE, NO_LANGUAGE, PYTHON, PACKAGES_DIFFER, STATE, SETTING, BUDGET, NO_CLIENT, NO_BUILDER, NO_IMAGE,
    IMAGE_CLOSED, IMAGE_PUSH, IMAGE_IMMUTABLE, SLOW, BROKEN,
)  # fmt: skip
CLUSTER = (
    API_CLOSED, API_LOGIN, API_FORBIDDEN, NODE_NOT_READY, NO_GPUS, NO_FABRIC, LOCKED_MEMORY, CLAIM, MOUNT, OPERATOR,
    JOB, JOB_LOG,
)  # fmt: skip
