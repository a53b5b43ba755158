"""A real Kubernetes control plane on loopback, with fake nodes that pretend to run pods, gone when its process ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cluster_build
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

#: Seconds for something that takes one on a quiet machine: tests share two cores with others.
PATIENCE = 60.0
POLL_SECONDS = 0.3
NEEDED = ("setpriv", "unshare", "nsenter", "mount")
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
#: The user of each token and its groups; the server's own roles for the controllers, so that a missing right is seen.
USERS = {
    "admin": ("cluster-admin", "system:masters"),
    "kwok": ("kwok", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}
#: Runs in the new network namespace and keeps it: loopback is down there at first.
HOLDER = """
import fcntl, signal, socket, struct
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
print("up", flush=True)
signal.pause()
"""


class PlaneError(Exception):
    """A server that did not come up, or an answer that never came, with what is known of it."""


def wait_for(what: str, seen: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Poll until `seen` returns something true, and return it; else fail with what it returned last."""
    until = time.monotonic() + patience
    while not (found := seen()):
        if time.monotonic() > until:
            raise PlaneError(f"after {patience:.0f} s still no {what}; last seen: {found!r}")
        time.sleep(POLL_SECONDS)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Plane:
    """etcd, API server, controller manager, scheduler and kwok, in a network namespace with nothing but loopback.

    Every process dies with the one that started it (`setpriv --pdeathsig`), also when that is killed.
    """

    users: Mapping[str, tuple[str, str]] = USERS
    controller_flags: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.inside: list[str] = []
        self.port = 0
        self.tokens = {user: secrets.token_hex(16) for user in self.users}

    def start(self) -> None:
        """Bring everything up; ready when the API server serves and the default service account exists."""
        self.logs.mkdir(parents=True)
        self.enter_namespace()
        self.start_api_server()
        for name in ("kube-controller-manager", "kube-scheduler"):
            self.write_kubeconfig(name)
        self.start_controllers()
        self.start_kwok()
        wait_for("service account `default`", lambda: self.kubectl("get", "sa", "default", check=False).returncode == 0)

    def enter_namespace(self) -> None:
        """Operators' webhook servers listen on every address: here there is only loopback, and every port is free."""
        isolate = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
        holder = subprocess.Popen(
            [*isolate, *DIES_WITH_US, sys.executable, "-c", HOLDER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.logs / "namespace.log").open("wb"),
        )
        self.processes.append(("namespace", holder))
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            raise PlaneError(f"no network namespace: {self.log('namespace')}")
        joined = ["--net"] if os.geteuid() == 0 else ["--user", "--net", "--preserve-credentials"]
        self.inside = ["nsenter", "--target", str(holder.pid), *joined]

    def spawn(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a server inside, its output in `logs/<name>.log`."""
        with (self.logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*self.inside, *DIES_WITH_US, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | (environment or {}),
                start_new_session=True,  # Ctrl-C reaches pytest alone, which then stops them in order
            )
        self.processes.append((name, process))
        return process

    def program(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        return self.spawn(name, str(cluster_build.program(name)), *flags)

    def start_api_server(self) -> None:
        self.port, client, peer = self.port or free_port(), free_port(), free_port()
        etcd = f"http://127.0.0.1:{client}"
        self.program(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "service-accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        rows = [f'{self.tokens[name]},{user},{name},"{groups}"' for name, (user, groups) in self.users.items()]
        (self.folder / "tokens.csv").write_text("\n".join(rows) + "\n")
        self.program(
            "kube-apiserver",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            # Never reached: it must only be no loopback address. No endpoint is published for it.
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            *self.authority(),
            f"--etcd-servers={etcd}",
            # It makes its own certificate there, signed for 127.0.0.1 because it is bound to it.
            f"--cert-dir={self.folder}/certificates",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--anonymous-auth=false",
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder}/service-accounts.key",
            f"--service-account-signing-key-file={self.folder}/service-accounts.key",
        )
        wait_for("certificate of the API server", self.certificate.is_file)
        self.write_kubeconfig("admin")
        wait_for("ready API server", self.serves)

    def authority(self) -> list[str]:
        """The API server's flags about who may do what."""
        return ["--authorization-mode=RBAC"]

    def serves(self) -> bool:
        self.check_running()
        return self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0

    def check_running(self) -> None:
        for name, process in self.processes:
            if process.poll() is not None:
                raise PlaneError(f"{name} ended with {process.returncode}:\n{self.log(name)}")

    @property
    def certificate(self) -> Path:
        return self.folder / "certificates" / "apiserver.crt"

    @property
    def kubeconfig(self) -> Path:
        return self.kubeconfig_of("admin")

    def kubeconfig_of(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    def write_kubeconfig(self, user: str) -> None:
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.certificate)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
        }
        self.kubeconfig_of(user).write_text(yaml.safe_dump(document))

    def start_controllers(self) -> None:
        self.program(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig_of('kube-controller-manager')}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.folder}/controller-certificates",
            "--leader-elect=false",
            f"--service-account-private-key-file={self.folder}/service-accounts.key",
            f"--root-ca-file={self.certificate}",
            # Each controller under its own account: without it, RBAC lets none of them create a pod.
            "--use-service-account-credentials=true",
            *self.controller_flags,
        )
        self.program(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig_of('kube-scheduler')}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.folder}/scheduler-certificates",
            "--leader-elect=false",
        )

    def start_kwok(self) -> None:
        """Pods of fake nodes start, end and go by its stages: its own fast ones, and ours of `stages.yaml`."""
        self.write_kubeconfig("kwok")
        stages = cluster_build.source("kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage"
        theirs = ("node/fast/node-initialize", "pod/fast/pod-ready")
        self.program(
            "kwok",
            f"--kubeconfig={self.kubeconfig_of('kwok')}",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--server-address=127.0.0.1:{free_port()}",
            "--node-port=0",
            "--node-lease-duration-seconds=0",
            *(f"--config={stages}/{name}.yaml" for name in theirs),
            f"--config={Path(__file__).parents[1] / 'cluster' / 'stages.yaml'}",
        )

    def run(
        self, command: Sequence[str], *, check: bool = True, input: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command inside, with the administrator's kubeconfig; its output is in the error where it fails."""
        done = subprocess.run(
            [*self.inside, *command],
            input=input,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)} | environment,
        )
        if check and done.returncode:
            raise PlaneError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def kubectl(
        self, *arguments: str, check: bool = True, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.run([str(cluster_build.program("kubectl")), *arguments], check=check, input=input)

    def apply(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        """Server-side apply with strict validation: an unknown field is refused."""
        done = self._apply(manifests)
        if done.returncode:
            raise PlaneError(f"the API server refused: {done.stderr}")

    def refusal(self, *manifests: Mapping[str, Any]) -> str:
        """The server's message where it refuses the manifests; an error where it takes them. Nothing is stored."""
        done = self._apply(manifests, "--dry-run=server")
        if done.returncode == 0:
            raise PlaneError(f"the API server took what it should refuse: {done.stdout}")
        return done.stderr

    def _apply(self, manifests: Sequence[Mapping[str, Any]], *options: str) -> subprocess.CompletedProcess[str]:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        strict = ("apply", "--server-side", "--field-manager=test", "--validate=strict", "--filename=-")
        return self.kubectl(*strict, *options, check=False, input=text)

    def get(self, *arguments: str) -> Any:
        """Objects as the server holds them: one, or a list where several match."""
        document = json.loads(self.kubectl("get", *arguments, "--output=json").stdout)
        return document["items"] if document["kind"] == "List" else document

    def wait_for_crds(self) -> None:
        """Until every CRD is served. `kubectl wait` fails on one that has no conditions yet."""

        def unserved() -> list[str]:
            served = {"type": "Established", "status": "True"}
            return [
                item["metadata"]["name"]
                for item in self.get("customresourcedefinitions")
                if not any(served.items() <= each.items() for each in item.get("status", {}).get("conditions") or [])
            ]

        wait_for("CRDs that are served", lambda: not unserved())

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace")[-3000:] if path.is_file() else "no log"

    def stop(self) -> None:
        """End every process, last started first, and wait until it is gone."""
        for _name, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()


def obstacle() -> str | None:
    """Why no control plane can run here although it is built, or None."""
    for name in NEEDED:
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian and Ubuntu: apt install util-linux mount)"
    flags = ["--net", "--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net", "--mount"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, check=False, timeout=10)
        return f"no network namespace is permitted here: {done.stderr.strip()}" if done.returncode else None
    return "making a network namespace did not end in 10 s"
