"""Install operators from their own manifests, but run each program as a process instead of a Deployment."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cluster_build
import yaml
from cluster_plane import Plane, free_port, wait_for

#: The folder of the webhook's certificate, hard-coded in each operator.
CERTIFICATES = Path("/tmp/k8s-webhook-server/serving-certs")
#: Gives one process its own content of that folder.
BIND = f'mount --bind "$1" {CERTIFICATES} && shift && exec "$@"'
HEALTHY = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)"


@dataclass(frozen=True)
class Operator:
    """An operator: its manifests, its program, and its names in the manifests."""

    name: str
    #: Folder of `go/`, Go module, and the folders of that module that kustomize combines.
    module: str
    package: str
    manifests: tuple[str, ...]
    namespace: str
    account: str
    secret: str
    #: Content of the file for `--config`; if empty, the ports are flags.
    configuration: Mapping[str, Any] = field(default_factory=dict)


PYTORCHJOB = Operator(
    "training-operator",
    module="training-operator",
    package="github.com/kubeflow/training-operator",
    manifests=("manifests/overlays/standalone",),
    namespace="kubeflow",
    account="training-operator",
    secret="training-operator-webhook-cert",
)
JOBSET = Operator(
    "jobset",
    module="trainer",
    package="sigs.k8s.io/jobset",
    manifests=("config/default",),
    namespace="jobset-system",
    account="jobset-controller-manager",
    secret="jobset-webhook-server-cert",
    configuration={
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True},
    },
)
#: The operator's overlay downloads JobSet; these are the other parts of the overlay.
TRAINER = Operator(
    "trainer-controller-manager",
    module="trainer",
    package="github.com/kubeflow/trainer/v2",
    manifests=("manifests/base/crds", "manifests/base/manager", "manifests/base/rbac", "manifests/base/webhook"),
    namespace="kubeflow-system",
    account="kubeflow-trainer-controller-manager",
    secret="kubeflow-trainer-webhook-cert",
    configuration={
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "certManagement": {
            "enable": True,
            "webhookServiceName": "kubeflow-trainer-controller-manager",
            "webhookSecretName": "kubeflow-trainer-webhook-cert",
        },
    },
)


def install(plane: Plane, operator: Operator) -> None:
    """Apply the manifests, run the program under its own service account, and wait until it is ready."""
    webhook, health = free_port(), free_port()
    objects = [adapt(item, webhook) for item in render(plane, operator) if item["kind"] != "Deployment"]
    first = [item for item in objects if item["kind"] in ("Namespace", "CustomResourceDefinition")]
    plane.apply(first)
    plane.wait_for_crds()
    plane.apply([item for item in objects if item not in first])
    certificates = plane.folder / f"{operator.name}-certificates"
    certificates.mkdir()
    CERTIFICATES.mkdir(parents=True, exist_ok=True)
    process = plane.spawn(
        operator.name,
        *("unshare", "--mount", "sh", "-c", BIND, "sh", str(certificates)),
        str(cluster_build.program(operator.name)),
        *flags(plane, operator, webhook, health),
        environment={"KUBECONFIG": str(account_kubeconfig(plane, operator)), "MY_POD_NAMESPACE": operator.namespace},
    )
    data = wait_for(f"certificate of {operator.name}", lambda: secret_of(plane, operator))
    for name, value in data.items():
        (certificates / name).write_bytes(base64.b64decode(value))
    url = f"http://127.0.0.1:{health}/readyz"

    def ready() -> bool:
        assert process.poll() is None, plane.log(operator.name)
        return plane.run([sys.executable, "-c", HEALTHY, url], check=False).returncode == 0

    wait_for(f"ready {operator.name}: {plane.log(operator.name)}", ready)


def render(plane: Plane, operator: Operator) -> Iterator[dict[str, Any]]:
    """Return the objects that kustomize builds from the files in Go's module cache."""
    source = cluster_build.source(operator.module, operator.package)
    folder = plane.folder / f"{operator.name}-manifests"
    folder.mkdir()
    document = {
        "namespace": operator.namespace,
        "resources": [os.path.relpath(source / path, folder) for path in operator.manifests],
    }
    if len(operator.manifests) > 1:
        (folder / "namespace.yaml").write_text(
            yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": operator.namespace}})
        )
        document["resources"] += ["namespace.yaml"]
        document["secretGenerator"] = [{"name": operator.secret, "options": {"disableNameSuffixHash": True}}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    text = plane.kubectl("kustomize", str(folder)).stdout
    # The CRDs are 50,000 lines: a minute with the loader in Python, a second with the one in C.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return (item for item in yaml.load_all(text, Loader=loader) if item)


def adapt(item: dict[str, Any], webhook: int) -> dict[str, Any]:
    """Point a Service at this machine, and a webhook at the port of the process."""
    if item["kind"] == "Service":
        return {**item, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    for hook in item.get("webhooks", []):
        hook["clientConfig"]["service"]["port"] = webhook
    return item


def flags(plane: Plane, operator: Operator, webhook: int, health: int) -> list[str]:
    if not operator.configuration:
        return [
            f"--webhook-server-port={webhook}",
            f"--health-probe-bind-address=127.0.0.1:{health}",
            f"--metrics-bind-address=127.0.0.1:{free_port()}",
        ]
    path = plane.folder / f"{operator.name}.yaml"
    ports = {
        "webhook": {"port": webhook},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": f"127.0.0.1:{free_port()}"},
    }
    path.write_text(yaml.safe_dump({**operator.configuration, **ports}))
    return [f"--config={path}"]


def account_kubeconfig(plane: Plane, operator: Operator) -> Path:
    """Write a kubeconfig with exactly the permissions that the operator's manifests grant."""
    token = plane.kubectl("create", "token", operator.account, "--namespace", operator.namespace, "--duration=24h")
    plane.tokens[operator.account] = token.stdout.strip()
    plane.write_kubeconfig(operator.account)
    return plane.kubeconfig_of(operator.account)


def secret_of(plane: Plane, operator: Operator) -> dict[str, str]:
    data: dict[str, str] = plane.get("secret", operator.secret, "--namespace", operator.namespace).get("data", {})
    return data if "tls.crt" in data else {}
