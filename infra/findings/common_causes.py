"""Causes that no cloud has for itself: tools, settings, images, the cluster, the job."""

from __future__ import annotations

from infra.findings.model import Cause

SLOW = Cause(
    "slow",
    "a check ends with `no answer in ... s`, or with status 429 or 5xx",
    "a proxy or a firewall swallows the question, or the service is down or has too much to do",
    "try again with --timeout 120; behind a proxy set HTTPS_PROXY",
)
BROKEN = Cause(
    "broken",
    "a check ends with the name of a Python error",
    "the check itself failed: an answer has a shape that it does not know",
    "open an issue with the output of --json",
)
NO_ENGINE = Cause(
    "pulumi-cli",
    "`no pulumi on PATH`, or a version that is refused",
    "the engine is not installed, or too old to stream what it does",
    "{install}",
    guide="https://www.pulumi.com/docs/install, the version that requirements.txt pins or newer",
)
NO_LANGUAGE = Cause(
    "pulumi-python",
    "`failed to load language plugin python`",
    "the engine starts Python through pulumi-language-python, which must be on PATH beside it",
    "{install}",
    guide="https://www.pulumi.com/docs/install: the whole archive, not the command alone",
)
PYTHON = Cause(
    "python",
    "`SyntaxError`, or packages without wheels",
    "this Python is outside the range that the pinned packages exist for",
    "make PYTHON=python3.12 install-infra",
)
OUT_OF_STEP = Cause(
    "lock",
    "`ModuleNotFoundError`, or a preview that wants to change what nobody touched",
    "the packages in the environment are not those of requirements.txt: another SDK has other inputs",
    "make install-infra, then run .venv/bin/python",
)
STATE = Cause(
    "state",
    "`pulumi` asks for a login or a passphrase, or the stack is locked",
    "where states are kept cannot be read with what this shell knows",
    "{fix}",
    guide="pulumi login; export PULUMI_CONFIG_PASSPHRASE=...; where a lock is left: pulumi cancel --stack <stack>",
)
SETTING = Cause(
    "settings",
    "`... settings to fix`",
    "a key of Pulumi.<stack>.yaml has a value that is not legal",
    "{fix}",
    guide="the command under each of them: pulumi config set --path <key> <value>",
)
BUDGET = Cause(
    "budget",
    "preview ends with `the stack costs ... USD per hour at gpu.nodes.max`",
    "the pool at its maximum costs more than budget.max_usd_per_hour",
    "{fix}, or fewer nodes: pulumi config set --path gpu.nodes.max N",
    guide="pulumi config set --path budget.max_usd_per_hour <usd>, or --path gpu.nodes.max with fewer nodes",
)
NO_BUILDER = Cause(
    "image-builder",
    "`up` fails at the image with `failed to connect to the docker API`",
    "the image is built on this machine by BuildKit, and no Docker daemon answers",
    "start Docker, or name an image that exists: pulumi config set --path job.image <image>@sha256:...",
)
NO_IMAGE = Cause(
    "image-missing",
    "pods stay in ImagePullBackOff",
    "the registry does not have the image of job.image",
    "push it, or correct the name: pulumi config set --path job.image {image}",
)
IMAGE_CLOSED = Cause(
    "image-closed",
    "`unauthorized` or `denied` from the registry",
    "the registry does not show the image to these credentials; nodes may still be allowed to pull it",
    "docker login {host}, or use the stack's own registry: pulumi config rm --path job.image",
)
API_CLOSED = Cause(
    "api-unreachable",
    "`dial tcp ...: i/o timeout` from kubectl and from `up`",
    "the Kubernetes API is private, or this machine's address is not among network.authorized_cidrs",
    "pulumi config set --path 'network.authorized_cidrs[0]' <your address>/32, then up; or work inside the network",
)
API_LOGIN = Cause(
    "api-login",
    "`You must be logged in to the server`",
    "the kubeconfig's command got no token, or its account has no role in the cluster",
    "{login}",
    guide="log in to the cloud again; be among the cluster's administrators, or ask one",
)
API_FORBIDDEN = Cause(
    "api-forbidden",
    "`... is forbidden: User ... cannot list resource`",
    "these credentials may use the cluster and not look at this",
    "ask the cluster's owner for a role that may list {what}",
)
NODE_NOT_READY = Cause(
    "node-not-ready",
    "`kubectl get nodes` shows NotReady",
    "the node's kubelet does not report, or its network add-on is missing",
    "kubectl describe node {node}; a node that stays so: kubectl delete node {node}, and the pool brings another",
)
NO_GPUS = Cause(
    "gpus-missing",
    "pods wait with `Insufficient nvidia.com/gpu` although the nodes are there",
    "the driver or the device plug-in does not run on the node, or a GPU has fallen off the bus",
    "kubectl get pods --all-namespaces --field-selector spec.nodeName={node}: look for device plug-in and driver",
)
NO_FABRIC = Cause(
    "fabric-missing",
    "pods wait with `Insufficient` fabric devices, or NCCL falls back to TCP",
    "the fabric's device plug-in does not run on the node, or the node has no such card",
    "kubectl describe node {node} | grep {device}, and the logs of the fabric's plug-in",
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
    "the node does not reach the file system, or lacks its driver",
    "kubectl --namespace {namespace} describe pod {pod}: the event says which",
)
OPERATOR = Cause(
    "operator",
    "jobs that nobody makes pods for; GPUs or devices that nobody advertises",
    "an operator's pods do not run",
    "kubectl --namespace {namespace} describe {kind} {name}, then: python -m infra up --stack {stack}",
)
JOB = Cause(
    "job",
    "the run makes no steps",
    "its job or one of its pods waits or has failed, for the reason given",
    "python -m workloads status --stack {stack}",
)
JOB_LOG = Cause(
    "job-log",
    "the trainer ends with an error",
    "its log says what",
    "python -m workloads logs --stack {stack} --pod {pod}",
)
NO_CLIENT = Cause(
    "client-missing",
    "a check ends with `the Python package ... is missing`",
    "the clouds' clients are optional: only the doctor uses them",
    "make install-doctor",
)

GENERAL = (
    NO_ENGINE, NO_LANGUAGE, PYTHON, OUT_OF_STEP, STATE, SETTING, BUDGET, NO_CLIENT, NO_BUILDER, NO_IMAGE, IMAGE_CLOSED,
    SLOW, BROKEN,
)  # fmt: skip
CLUSTER = (
    API_CLOSED, API_LOGIN, API_FORBIDDEN, NODE_NOT_READY, NO_GPUS, NO_FABRIC, CLAIM, MOUNT, OPERATOR, JOB, JOB_LOG,
)  # fmt: skip
