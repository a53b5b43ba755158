"""Configuration files and flags of the servers of one node and its control plane; for separate namespaces."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import node_build
import node_image
import yaml
from cluster_plane import USERS, Plane, PlaneError, wait_for
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NODE = "node"
BRIDGE = "trc0"
#: The address of the bridge, the kubelet and DNS. It exists only in the node's network namespace.
ADDRESS, SUBNET = "10.244.0.1", "10.244.0.0/24"
#: Fixed: otherwise a bridge uses the lowest address of its members, and DNS fails for 10 s after every change.
MAC = "02:00:0a:f4:00:01"
CONTAINERD = "/run/containerd/containerd.sock"
#: Limits of locked memory in bytes, soft and hard, that containerd and so every container has: as on AKS
#: (Azure/AKS#4893), and at most systemd's default.
MEMLOCK = (64 * 2**10, 8 * 2**20)
#: A runtime whose containers start from the specification in `specification_path`, for tests that change it.
CHANGED_RUNTIME = "changed"
CGROUPS = Path("/sys/fs/cgroup")
CGROUP = "torchrec-cloud-node"
#: The default volume of stack `local`. On the node it is a folder that only the node sees.
VOLUME = "/var/lib/torchrec-cloud"
DNS_ROLE = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "coredns"},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coredns"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "coredns"}],
    },
]


class NodePlane(Plane):
    """The servers of the control plane and the node, for process 1 of the node's namespaces."""

    users: Mapping[str, tuple[str, str]] = {
        **{name: user for name, user in USERS.items() if name != "kwok"},
        "kubelet": (f"system:node:{NODE}", "system:nodes"),
        "coredns": ("coredns", ""),
    }
    #: A claim that is created before its volume waits for the next sync, every 15 s by default.
    controller_flags = ("--pvclaimbinder-sync-period=1s",)

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder)
        self.port = port

    def start(self) -> None:
        """Start every server after the servers that it needs."""
        self.start_containerd()
        make_certificates(self.folder)
        self.start_api_server()
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "coredns"):
            self.write_kubeconfig(name)
        self.start_controllers()
        self.start_kubelet()
        self.apply(DNS_ROLE)
        self.start_dns()

    def authorization_flags(self) -> list[str]:
        """Restrict nodes to their own objects, and access to the kubelet to the API server."""
        return [
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={self.folder}/api-server.crt",
            f"--kubelet-client-key={self.folder}/api-server.key",
            f"--kubelet-certificate-authority={self.folder}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def is_ready(self) -> bool:
        """Request /readyz directly: each kubectl takes half a second of two cores."""
        self.check_running()
        request = urllib.request.Request(  # a local server
            f"https://127.0.0.1:{self.port}/readyz", headers={"Authorization": f"Bearer {self.tokens['admin']}"}
        )
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        try:
            with urllib.request.urlopen(request, timeout=2, context=trusted) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def start_containerd(self) -> None:
        node_image.restore()
        path = self.folder / "containerd.toml"
        path.write_text(containerd_configuration(self.folder))
        default = subprocess.run(["ctr", "oci", "spec"], check=True, capture_output=True, text=True).stdout
        specification_path(self.folder).write_text(default)
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(bridge_network(self.folder)))
        limit = f"--memlock={MEMLOCK[0]}:{MEMLOCK[1]}"
        self.spawn("containerd", "prlimit", limit, "containerd", "--config", str(path))
        until = time.monotonic() + 30
        while not Path(CONTAINERD).exists():
            self.check_running()
            if time.monotonic() > until:
                raise PlaneError(f"containerd does not listen: {self.log('containerd')}")
            time.sleep(0.1)

    def start_kubelet(self) -> None:
        path = self.folder / "kubelet.yaml"
        path.write_text(yaml.safe_dump(kubelet_configuration(self.folder)))
        (self.folder / "resolv.conf").write_text("")
        self.spawn(
            "kubelet",
            str(node_build.program("kubelet")),
            f"--config={path}",
            f"--kubeconfig={self.kubeconfig_of('kubelet')}",
            f"--root-dir={self.folder}/kubelet",
            f"--cert-dir={self.folder}/kubelet-certificates",
            f"--hostname-override={NODE}",
            f"--node-ip={ADDRESS}",
        )

    def start_dns(self) -> None:
        path = self.folder / "Corefile"
        path.write_text(
            f".:53 {{\n  bind {ADDRESS}\n  ready 127.0.0.1:8181\n  errors\n  cache 5 {{\n    denial 0\n  }}\n"
            f"  kubernetes cluster.local {{\n    kubeconfig {self.kubeconfig_of('coredns')} test\n    ttl 1\n  }}\n}}\n"
        )
        self.spawn("coredns", str(node_build.program("coredns")), "-conf", str(path))
        wait_for("ready DNS server", is_dns_ready)


def is_dns_ready() -> bool:
    """Return whether CoreDNS has synced with the API server."""
    try:
        with urllib.request.urlopen("http://127.0.0.1:8181/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def specification_path(folder: Path) -> Path:
    """Return the file with the OCI specification of runtime CHANGED_RUNTIME, which containerd reads when it starts."""
    return folder / "specification.json"


def containerd_configuration(folder: Path) -> str:
    """Return the configuration of containerd: overlay snapshots in the store with the image; nothing is pulled."""
    return f"""
version = 2
root = "{node_image.store()}"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{node_image.PAUSE}"
  # Without CAP_SYS_RESOURCE runc cannot lower a sandbox's score, and no pod starts.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{CHANGED_RUNTIME}]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{specification_path(folder)}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{node_build.CNI}"
    conf_dir = "{folder}/cni"
"""


def bridge_network(folder: Path) -> dict[str, object]:
    """Return a CNI network that gives each pod an address on the bridge, inside the network namespace."""
    addresses = {"type": "host-local", "dataDir": f"{folder}/addresses", "ranges": [[{"subnet": SUBNET}]]}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def kubelet_configuration(folder: Path) -> dict[str, object]:
    """Return the configuration of a kubelet that uses only its own folder, cgroup and address."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": f"{folder}/ca.crt"},
        },
        # Any client with a certificate of that authority, and only the API server has one.
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": f"{folder}/kubelet.crt",
        "tlsPrivateKeyFile": f"{folder}/kubelet.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,
        "clusterDNS": [ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
        "resolvConf": f"{folder}/resolv.conf",
        "podLogsDir": f"{folder}/pod-logs",
        "volumePluginDir": f"{folder}/volume-plugins",
        "makeIPTablesUtilChains": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        # A deleted image cannot be pulled again, and a developer's full disk must not evict pods.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "500Mi",
            "imagefs.available": "500Mi",
            "nodefs.inodesFree": "1000",
        },
    }


def make_certificates(folder: Path) -> None:
    """Create a certificate authority, the kubelet's certificate and the API server's client certificate."""
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])

    def write(name: str, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> None:
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=365))
            .add_extension(extension, critical=False)
            .sign(authority, hashes.SHA256())
        )
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def write_signed(name: str, common: str, extension: x509.ExtensionType) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{name}.key").write_bytes(pem)
        write(name, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]), key, extension)

    write("ca", issuer, authority, x509.BasicConstraints(ca=True, path_length=None))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ADDRESS))])
    write_signed("kubelet", f"system:node:{NODE}", address)
    write_signed("api-server", "kube-apiserver", x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CLIENT_AUTH]))


def cgroups() -> list[Path]:
    """Return the node's folder in each cgroup hierarchy; version 2 has one hierarchy."""
    if (CGROUPS / "cgroup.controllers").is_file():
        return [CGROUPS / CGROUP]
    return [path / CGROUP for path in sorted(CGROUPS.iterdir()) if (path / "cgroup.procs").is_file()]


def make_cgroups() -> None:
    """Create the root cgroup of all pods; a cpuset needs its processors before a process can join it."""
    for path in cgroups():
        path.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (path / name).is_file() and (path.parent / name).is_file():
                (path / name).write_text((path.parent / name).read_text())
        if (path / "cpu.shares").is_file():
            # By default all pods together would get the share of a single process.
            (path / "cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)))


def remove_cgroups() -> None:
    """Delete the cgroups, innermost first; this fails while a cgroup has processes."""
    for top in cgroups():
        for folder, _, _ in os.walk(top, topdown=False):
            Path(folder).rmdir()


def prepare_mounts(folder: Path) -> None:
    """Mount the node's folder, or memory, over the folders that servers write to; only this namespace sees it."""

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)

    # Volume mounts must propagate from the kubelet to the containers, but not to this machine.
    mount("--make-rshared", "/")
    mount("-t", "tmpfs", "tmpfs", "/run")
    for path in ("/var/lib", "/var/log"):
        upper, work = (folder / kind / path.replace("/", "-") for kind in ("upper", "work"))
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        mount("-t", "overlay", "-o", f"lowerdir={path},upperdir={upper},workdir={work}", "overlay", path)
    Path(VOLUME).mkdir(exist_ok=True)
    os.chown(VOLUME, 0, 0)
    # The trainer's user has group 0, and new folders inherit the group.
    Path(VOLUME).chmod(0o2775)
    kernel = folder / "kernel"
    kernel.mkdir()
    # The kubelet changes these settings of the whole machine; it gets a copy in its folder instead.
    for name in ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
                 "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"):  # fmt: skip
        own = kernel / name.replace("/", ".")
        own.write_text(Path("/proc/sys", name).read_text())
        mount("--bind", str(own), f"/proc/sys/{name}")


def prepare_network() -> None:
    """Bring up loopback and the bridge of the pods."""
    for line in (
        "link set lo up",
        f"link add {BRIDGE} address {MAC} type bridge",
        f"addr add {ADDRESS}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ):
        subprocess.run(["ip", *line.split()], check=True)
