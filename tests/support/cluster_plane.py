"""A real Kubernetes control plane on loopback, with fake nodes; it ends with the process that started it."""

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

#: Seconds to wait for what takes one second on an idle machine: tests may share two cores.
PATIENCE = 60.0
POLL_SECONDS = 0.3
NEEDED = ("setpriv", "unshare", "nsenter", "mount")
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
#: User and groups of each token. Controllers get their built-in roles, so that a missing permission fails a test.
USERS = {
    "admin": ("cluster-admin", "system:masters"),
    "kwok": ("kwok", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
}
#: Brings loopback up in the new network namespace and keeps the namespace alive.
HOLDER = """
import fcntl, signal, socket, struct
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
print("up", flush=True)
signal.pause()
"""


class PlaneError(Exception):
    """A server did not start, or an expected state was not reached in time."""


def wait_for(what: str, check: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Poll until `check` returns a true value, and return it; raise with its last value after `patience` seconds."""
    until = time.monotonic() + patience
    while not (found := check()):
        if time.monotonic() > until:
            raise PlaneError(f"no {what} after {patience:.0f} s; last value: {found!r}")
        time.sleep(POLL_SECONDS)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Plane:
    """etcd, API server, controller manager, scheduler and kwok, in a network namespace with only loopback.

    Every process is killed when its parent ends (`setpriv --pdeathsig`).
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
        """Start everything; wait until the API server answers and the default service account exists."""
        self.logs.mkdir(parents=True)
        self.enter_namespace()
        self.start_api_server()
        for name in ("kube-controller-manager", "kube-scheduler"):
            self.write_kubeconfig(name)
        self.start_controllers()
        self.start_kwok()
        wait_for("service account `default`", lambda: self.kubectl("get", "sa", "default", check=False).returncode == 0)

    def enter_namespace(self) -> None:
        """Create a network namespace: webhook servers of operators listen on every address and on fixed ports."""
        isolate = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
        holder = subprocess.Popen(
            [*isolate, *DIE_WITH_PARENT, sys.executable, "-c", HOLDER],
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
        """Start a server inside; its output goes to `logs/<name>.log`."""
        with (self.logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*self.inside, *DIE_WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | (environment or {}),
                start_new_session=True,  # Ctrl-C reaches only pytest, which stops the servers in order
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
            # Never used, but the server requires an address that is not loopback.
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            *self.authorization_flags(),
            f"--etcd-servers={etcd}",
            # The server creates its certificate there, for 127.0.0.1.
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
        wait_for("ready API server", self.is_ready)

    def authorization_flags(self) -> list[str]:
        """Return the API server's authorization flags."""
        return ["--authorization-mode=RBAC"]

    def is_ready(self) -> bool:
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
            # Each controller uses its own account; without it RBAC allows none of them to create a pod.
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
        """Start kwok, which simulates pods on fake nodes by its own fast stages and those in `stages.yaml`."""
        self.write_kubeconfig("kwok")
        stages = cluster_build.source("kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage"
        built_in = ("node/fast/node-initialize", "pod/fast/pod-ready")
        self.program(
            "kwok",
            f"--kubeconfig={self.kubeconfig_of('kwok')}",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--server-address=127.0.0.1:{free_port()}",
            "--node-port=0",
            "--node-lease-duration-seconds=0",
            *(f"--config={stages}/{name}.yaml" for name in built_in),
            f"--config={Path(__file__).parents[1] / 'cluster' / 'stages.yaml'}",
        )

    def run(
        self, command: Sequence[str], *, check: bool = True, input: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, with the administrator's kubeconfig; raise PlaneError with its output if it fails."""
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
        """Apply manifests on the server side with strict validation, which rejects unknown fields."""
        done = self._apply(manifests)
        if done.returncode:
            raise PlaneError(f"the API server rejected the manifests: {done.stderr}")

    def rejection(self, *manifests: Mapping[str, Any]) -> str:
        """Return the server's error for invalid manifests, with a dry run; raise PlaneError if it accepts them."""
        done = self._apply(manifests, "--dry-run=server")
        if done.returncode == 0:
            raise PlaneError(f"the API server accepted invalid manifests: {done.stdout}")
        return done.stderr

    def _apply(self, manifests: Sequence[Mapping[str, Any]], *options: str) -> subprocess.CompletedProcess[str]:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        strict = ("apply", "--server-side", "--field-manager=test", "--validate=strict", "--filename=-")
        return self.kubectl(*strict, *options, check=False, input=text)

    def get(self, *arguments: str) -> Any:
        """Return the object from the server, or a list if several match."""
        document = json.loads(self.kubectl("get", *arguments, "--output=json").stdout)
        return document["items"] if document["kind"] == "List" else document

    def wait_for_crds(self) -> None:
        """Wait until every CRD is served. `kubectl wait` fails on a CRD without conditions."""

        def unserved() -> list[str]:
            served = {"type": "Established", "status": "True"}
            return [
                item["metadata"]["name"]
                for item in self.get("customresourcedefinitions")
                if not any(served.items() <= each.items() for each in item.get("status", {}).get("conditions") or [])
            ]

        wait_for("served CRDs", lambda: not unserved())

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace")[-3000:] if path.is_file() else "no log"

    def stop(self) -> None:
        """Stop the processes in reverse order, and wait for each to exit."""
        for _name, process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()


def obstacle() -> str | None:
    """Return why this machine cannot run a control plane, or None."""
    for name in NEEDED:
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian and Ubuntu: apt install util-linux mount)"
    flags = ["--net", "--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net", "--mount"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, check=False, timeout=10)
        return f"cannot create a network namespace: {done.stderr.strip()}" if done.returncode else None
    return "creating a network namespace took more than 10 s"
