"""The network between GPU nodes: Fast Socket, or GPUDirect-TCPX with what it needs inside the cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pulumi
import pulumi_kubernetes as k8s

from infra.clouds.gcp.network import FABRIC_NETWORK_NAMES, FabricNetwork
from infra.clouds.gcp.settings import Settings
from infra.contract import CustomResource, Fabric, Mount, Sidecar

#: Releases that work together: container-engine-accelerators at 992db812, gpudirect-tcpx and nri_device_injector.
_TCPX_PLUGIN = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/nccl-plugin-gpudirecttcpx-dev:v3.1.9"
_TCPX_DAEMON = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12"
_DEVICE_INJECTOR = (
    "gcr.io/gke-release/nri-device-injector@sha256:6e79483d52abdc28454bf186320b10a56b0f117a10e8d65d5c74dbb821a76970"
)
_PAUSE = "gke.gcr.io/pause:3.8@sha256:880e63f94b145e46f1b1082bb71b85e21f16b99b180b9996407d61240ceb9830"

#: The sidecar's name, by which the device injector finds it.
_SIDECAR = "tcpx-daemon"
_SOCKETS = "/run/tcpx"
_LIBRARIES = "/usr/local/nvidia/lib64"
_HOST_LIBRARIES = "/home/kubernetes/bin/nvidia/lib64"

#: CPU cores near each network card, to which the plug-in pins its threads (nccl-config.yaml of the same release).
_TX_CORES = "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177"
_RX_CORES = "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191"

_TCPX_ENV = {
    "LD_LIBRARY_PATH": _LIBRARIES,
    "NCCL_BUFFSIZE": "4194304",
    "NCCL_CROSS_NIC": "0",
    "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
    "NCCL_GPUDIRECTTCPX_RX_BINDINGS": _RX_CORES,
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
    "NCCL_GPUDIRECTTCPX_TX_BINDINGS": _TX_CORES,
    "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": _SOCKETS,
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
    "NCCL_P2P_PCI_CHUNKSIZE": "524288",
    "NCCL_P2P_PXN_LEVEL": "0",
    "NCCL_PROTO": "Simple",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_NTHREADS": "1",
}


class Tcpx(pulumi.ComponentResource):
    """What GPUDirect-TCPX needs inside the cluster: Kubernetes networks and two DaemonSets.

    The installer copies NCCL's plug-in to where GKE mounts the driver. The injector gives the trainer's unprivileged
    sidecar the GPU devices that an annotation lists.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        networks: Sequence[FabricNetwork],
        provider: k8s.Provider,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the Kubernetes networks, the installer and the injector."""
        super().__init__("torchrec-cloud:gcp:Tcpx", name, None, opts)
        self._name, self._labels = name, settings.labels
        self._accelerator = settings.instance.accelerator if settings.instance else ""
        self._child = pulumi.ResourceOptions(parent=self, provider=provider)
        for network in networks:
            self._create_network(network)
        self._create_installer()
        self._create_injector()
        self.register_outputs({})

    def _create_network(self, network: FabricNetwork) -> None:
        """Create the network's parameters, then the network: GKE deletes parameters only after their network."""
        key, group = network.kubernetes_name, "networking.gke.io"
        spec = {"vpc": network.vpc.name, "vpcSubnet": network.subnet.name, "deviceMode": "NetDevice"}
        parameters = self._create_object(CustomResource(f"{group}/v1", "GKENetworkParamSet", key, spec), [])
        reference = {"group": group, "kind": "GKENetworkParamSet", "name": key}
        spec = {"type": "Device", "parametersRef": reference}
        self._create_object(CustomResource(f"{group}/v1", "Network", key, spec), [parameters])

    def _create_object(self, item: CustomResource, depends_on: Sequence[pulumi.Resource]) -> pulumi.Resource:
        """Create a cluster-wide custom resource."""
        return k8s.apiextensions.CustomResource(
            f"{self._name}-{item.kind.lower()}-{item.name}",
            api_version=item.api_version,
            kind=item.kind,
            metadata=k8s.meta.v1.ObjectMetaArgs(name=item.name, labels=self._labels),
            spec=item.spec,
            opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(depends_on=list(depends_on))),
        )

    def _create_installer(self) -> None:
        """Install NCCL's plug-in on each node."""
        script = (
            "set -ex; /scripts/container_entry.sh install --install-nccl; "
            f"mkdir -p {_LIBRARIES}; cp -r /var/lib/tcpx/lib64/. {_LIBRARIES}"
        )
        install = _privileged_container(
            "install", _TCPX_PLUGIN, {"var-lib": "/var/lib", "kubernetes-bin": "/usr/local"}, ["/bin/sh", "-c", script]
        )
        pause = k8s.core.v1.ContainerArgs(name="pause", image=_PAUSE)
        paths = {"var-lib": "/var/lib", "kubernetes-bin": "/home/kubernetes/bin"}
        self._create_daemon_set("tcpx-installer", paths, [pause], [install])

    def _create_injector(self) -> None:
        """Run the device injector on each node."""
        mounts = {"dev": "/dev", "nri": "/var/run/nri"}
        self._create_daemon_set(
            "device-injector", mounts, [_privileged_container("injector", _DEVICE_INJECTOR, mounts)], []
        )

    def _create_daemon_set(
        self,
        daemon_set: str,
        host_paths: dict[str, str],
        containers: Sequence[k8s.core.v1.ContainerArgs],
        init_containers: Sequence[k8s.core.v1.ContainerArgs],
    ) -> None:
        """Run containers on every node with this accelerator, regardless of its taints."""
        labels = {"app.kubernetes.io/name": daemon_set}
        volumes = [
            k8s.core.v1.VolumeArgs(name=name, host_path=k8s.core.v1.HostPathVolumeSourceArgs(path=path))
            for name, path in host_paths.items()
        ]
        pod = k8s.core.v1.PodSpecArgs(
            priority_class_name="system-node-critical",
            node_selector={"cloud.google.com/gke-accelerator": self._accelerator},
            tolerations=[k8s.core.v1.TolerationArgs(operator="Exists")],
            host_network=True,
            host_pid=True,
            init_containers=list(init_containers),
            containers=list(containers),
            volumes=volumes,
        )
        template = k8s.core.v1.PodTemplateSpecArgs(metadata=k8s.meta.v1.ObjectMetaArgs(labels=labels), spec=pod)
        k8s.apps.v1.DaemonSet(
            f"{self._name}-{daemon_set}",
            # kube-system admits privileged pods, and GKE allows system-node-critical only there.
            metadata=k8s.meta.v1.ObjectMetaArgs(name=daemon_set, namespace="kube-system", labels=self._labels | labels),
            spec=k8s.apps.v1.DaemonSetSpecArgs(
                selector=k8s.meta.v1.LabelSelectorArgs(match_labels=labels), template=template
            ),
            opts=self._child,
        )


def _privileged_container(
    name: str, image: str, mounts: dict[str, str], command: Sequence[str] | None = None
) -> k8s.core.v1.ContainerArgs:
    """Return a privileged container with host paths mounted."""
    return k8s.core.v1.ContainerArgs(
        name=name,
        image=image,
        command=list(command) if command else None,
        resources=k8s.core.v1.ResourceRequirementsArgs(requests={"cpu": "150m"}),
        security_context=k8s.core.v1.SecurityContextArgs(privileged=True),
        volume_mounts=[k8s.core.v1.VolumeMountArgs(name=volume, mount_path=path) for volume, path in mounts.items()],
    )


def node_fabric(settings: Settings) -> Fabric:
    """Return how pods use the network between GPU nodes, and the log line of NCCL that proves it."""
    if settings.tcpx:
        return _tcpx_fabric()
    if settings.fast_socket:
        # GKE mounts the plug-in together with the driver; NCCL finds it on the loader's path.
        env = {"LD_LIBRARY_PATH": _LIBRARIES, "NCCL_SOCKET_IFNAME": "eth0"}
        return Fabric(name="fast-socket", env=env, expected_log="NET/FastSocket")
    return Fabric(name="tcp")


def _tcpx_fabric() -> Fabric:
    """Return the annotations for the four cards, the sidecar that owns their buffers, and the plug-in's path."""
    interfaces = [{"interfaceName": "eth0", "network": "default"}]
    interfaces += [
        {"interfaceName": f"eth{number}", "network": name} for number, name in enumerate(FABRIC_NETWORK_NAMES, start=1)
    ]
    devices = [f"/dev/nvidia{number}" for number in range(8)] + ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    sockets = Mount("tcpx-socket", _SOCKETS, read_only=False)
    libraries = Mount("tcpx-libraries", _LIBRARIES, _HOST_LIBRARIES)
    return Fabric(
        name="tcpx",
        env=_TCPX_ENV,
        pod_annotations={
            "networking.gke.io/default-interface": "eth0",
            "networking.gke.io/interfaces": json.dumps(interfaces),
            f"devices.gke.io/container.{_SIDECAR}": "".join(f"- path: {device}\n" for device in devices),
        },
        # The daemon's sockets belong to root, and only their owner may connect. Upstream's pods run as root too.
        as_root=True,
        capabilities=("IPC_LOCK",),
        mounts=(sockets, libraries),
        sidecars=(_tcpx_daemon(sockets, libraries),),
        expected_log="NET/GPUDirectTCPX",
    )


def _tcpx_daemon(sockets: Mount, libraries: Mount) -> Sidecar:
    """Return the daemon that manages GPU receive buffers and steers flows by changing the host's settings."""
    program = "/tcpgpudmarxd/build/app/tcpgpudmarxd"
    options = ["--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd", "--uds_path", _SOCKETS]
    return Sidecar(
        name=_SIDECAR,
        image=_TCPX_DAEMON,
        command=(program, *options, "--setup_param", "--verbose 128 2 0"),
        env={"LD_LIBRARY_PATH": _LIBRARIES},
        capabilities=("NET_ADMIN",),
        mounts=(
            sockets,
            libraries,
            Mount("host-sys", "/hostsysfs", "/sys", read_only=False),
            Mount("host-proc-sys", "/hostprocsysfs", "/proc/sys", read_only=False),
        ),
    )
