"""The private network, its one way out, and the fabric between GPU nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as k8s

from infra.clouds.gcp.settings import Settings
from infra.contract import CustomResource, Fabric, Mount, Sidecar

#: Names of the subnet's secondary ranges.
PODS, SERVICES = "pods", "services"

#: The largest packet that GPUDirect-TCPX cuts into whole memory pages; NCCL over TCP gains from large ones too.
#: https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx
MTU_BYTES = 8244

#: Where operators listen for the API server. GKE opens 443 and 10250 for it and nothing else, and a webhook that is not
#: reached refuses every job: https://cloud.google.com/kubernetes-engine/docs/how-to/private-clusters#add_firewall_rules
_WEBHOOK_PORTS = ("8443", "9443")

#: Releases that belong together: container-engine-accelerators at 992db812, gpudirect-tcpx and nri_device_injector.
_TCPX_PLUGIN = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/nccl-plugin-gpudirecttcpx-dev:v3.1.9"
_TCPX_DAEMON = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12"
_DEVICE_INJECTOR = (
    "gcr.io/gke-release/nri-device-injector@sha256:6e79483d52abdc28454bf186320b10a56b0f117a10e8d65d5c74dbb821a76970"
)
_PAUSE = "gke.gcr.io/pause:3.8@sha256:880e63f94b145e46f1b1082bb71b85e21f16b99b180b9996407d61240ceb9830"

#: The daemon beside the trainer; the device injector finds it by this name.
_SIDECAR = "tcpx-daemon"
_SOCKETS = "/run/tcpx"
_LIBRARIES = "/usr/local/nvidia/lib64"
_HOST_LIBRARIES = "/home/kubernetes/bin/nvidia/lib64"

#: CPU cores near each network card, by which the plug-in pins its threads (nccl-config.yaml of the same release).
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


@dataclass(frozen=True)
class FabricNetwork:
    """One network of GPUDirect-TCPX and its subnet; `kubernetes_name` is what a pod's annotation calls it."""

    kubernetes_name: str
    vpc: gcp.compute.Network
    subnet: gcp.compute.Subnetwork


class Network(pulumi.ComponentResource):
    """A VPC without public addresses: one subnet, one NAT gateway, and a network for each further card of a GPU node.

    `node_tag` is what makes a machine a node for the firewall, `nat` the way to the internet that nodes need to start.
    """

    vpc: gcp.compute.Network
    subnet: gcp.compute.Subnetwork
    nat: gcp.compute.RouterNat
    node_tag: str
    fabric: Sequence[FabricNetwork]

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("torchrec-cloud:gcp:Network", name, None, opts)
        self._name, self._settings = name, settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.node_tag = f"{name}-node"
        self.vpc = self._vpc(f"{name}-vpc")
        self.subnet = self._subnet()
        self.nat = self._nat()
        self._firewall("nodes", self.vpc, [settings.network.cidr, settings.network.pods_cidr])
        self._webhooks()
        self.fabric = self._fabric_networks() if settings.tcpx else ()
        self.register_outputs({"vpc": self.vpc.name, "subnet": self.subnet.name})

    def _vpc(self, name: str) -> gcp.compute.Network:
        return gcp.compute.Network(
            name, auto_create_subnetworks=False, mtu=MTU_BYTES, routing_mode="REGIONAL", opts=self._child
        )

    def _subnet(self) -> gcp.compute.Subnetwork:
        """The nodes' subnet; storage, registry and metrics are reached inside Google's network, not through NAT."""
        net = self._settings.network
        secondary = [
            gcp.compute.SubnetworkSecondaryIpRangeArgs(range_name=range_name, ip_cidr_range=cidr)
            for range_name, cidr in ((PODS, net.pods_cidr), (SERVICES, net.services_cidr))
        ]
        return gcp.compute.Subnetwork(
            f"{self._name}-subnet",
            network=self.vpc.id,
            region=self._settings.region,
            ip_cidr_range=net.cidr,
            secondary_ip_ranges=secondary,
            private_ip_google_access=True,
            opts=self._child,
        )

    def _nat(self) -> gcp.compute.RouterNat:
        """The way out; a node gets more ports while it pulls images from many places at once."""
        region = self._settings.region
        router = gcp.compute.Router(f"{self._name}-router", network=self.vpc.id, region=region, opts=self._child)
        return gcp.compute.RouterNat(
            f"{self._name}-nat",
            router=router.name,
            region=region,
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[
                gcp.compute.RouterNatSubnetworkArgs(name=self.subnet.id, source_ip_ranges_to_nats=["ALL_IP_RANGES"])
            ],
            enable_dynamic_port_allocation=True,
            enable_endpoint_independent_mapping=False,
            min_ports_per_vm=64,
            log_config=gcp.compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
            opts=self._child,
        )

    def _firewall(self, what: str, vpc: gcp.compute.Network, sources: Sequence[str]) -> None:
        """Nodes and pods reach each other on every port: NCCL and c10d choose theirs when a job starts."""
        gcp.compute.Firewall(
            f"{self._name}-{what}",
            network=vpc.id,
            direction="INGRESS",
            source_ranges=list(sources),
            target_tags=[self.node_tag],
            allows=[gcp.compute.FirewallAllowArgs(protocol=protocol) for protocol in ("tcp", "udp", "icmp")],
            opts=self._child,
        )

    def _webhooks(self) -> None:
        gcp.compute.Firewall(
            f"{self._name}-webhooks",
            network=self.vpc.id,
            direction="INGRESS",
            source_ranges=[self._settings.network.control_plane_cidr],
            target_tags=[self.node_tag],
            allows=[gcp.compute.FirewallAllowArgs(protocol="tcp", ports=list(_WEBHOOK_PORTS))],
            opts=self._child,
        )

    def _fabric_networks(self) -> Sequence[FabricNetwork]:
        """A card takes part in one VPC only, so each of the four further cards has its own."""
        made = []
        for kubernetes_name, cidr in zip(_network_names(), self._settings.network.fabric_subnets, strict=True):
            vpc = self._vpc(f"{self._name}-{kubernetes_name}")
            subnet = gcp.compute.Subnetwork(
                f"{self._name}-{kubernetes_name}-subnet",
                network=vpc.id,
                region=self._settings.region,
                ip_cidr_range=cidr,
                opts=self._child,
            )
            self._firewall(f"{kubernetes_name}-cards", vpc, [cidr])
            made.append(FabricNetwork(kubernetes_name, vpc, subnet))
        return made


class Tcpx(pulumi.ComponentResource):
    """What GPUDirect-TCPX needs inside the cluster: its networks by their Kubernetes names, two helpers on each node.

    The installer puts NCCL's plug-in where GKE mounts the driver; the injector gives the trainer's unprivileged sidecar
    the GPU devices that its annotation names.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        networks: Sequence[FabricNetwork],
        provider: k8s.Provider,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:gcp:Tcpx", name, None, opts)
        self._name, self._labels = name, settings.labels
        self._accelerator = settings.instance.accelerator if settings.instance else ""
        self._child = pulumi.ResourceOptions(parent=self, provider=provider)
        for network in networks:
            self._network(network)
        self._installer()
        self._injector()
        self.register_outputs({})

    def _network(self, network: FabricNetwork) -> None:
        """The network's parameters, then the network: GKE lets the parameters go only when nothing points at them."""
        key, group = network.kubernetes_name, "networking.gke.io"
        spec = {"vpc": network.vpc.name, "vpcSubnet": network.subnet.name, "deviceMode": "NetDevice"}
        parameters = self._object(CustomResource(f"{group}/v1", "GKENetworkParamSet", key, spec), [])
        reference = {"group": group, "kind": "GKENetworkParamSet", "name": key}
        spec = {"type": "Device", "parametersRef": reference}
        self._object(CustomResource(f"{group}/v1", "Network", key, spec), [parameters])

    def _object(self, item: CustomResource, after: Sequence[pulumi.Resource]) -> pulumi.Resource:
        return k8s.apiextensions.CustomResource(
            f"{self._name}-{item.kind.lower()}-{item.name}",
            api_version=item.api_version,
            kind=item.kind,
            metadata=k8s.meta.v1.ObjectMetaArgs(name=item.name, labels=self._labels),
            spec=item.spec,
            opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(depends_on=list(after))),
        )

    def _installer(self) -> None:
        script = (
            "set -ex; /scripts/container_entry.sh install --install-nccl; "
            f"mkdir -p {_LIBRARIES}; cp -r /var/lib/tcpx/lib64/. {_LIBRARIES}"
        )
        install = _privileged(
            "install", _TCPX_PLUGIN, {"var-lib": "/var/lib", "kubernetes-bin": "/usr/local"}, ["/bin/sh", "-c", script]
        )
        pause = k8s.core.v1.ContainerArgs(name="pause", image=_PAUSE)
        paths = {"var-lib": "/var/lib", "kubernetes-bin": "/home/kubernetes/bin"}
        self._on_each_node("tcpx-installer", paths, [pause], [install])

    def _injector(self) -> None:
        mounts = {"dev": "/dev", "nri": "/var/run/nri"}
        self._on_each_node("device-injector", mounts, [_privileged("injector", _DEVICE_INJECTOR, mounts)], [])

    def _on_each_node(
        self,
        what: str,
        host_paths: dict[str, str],
        containers: Sequence[k8s.core.v1.ContainerArgs],
        first: Sequence[k8s.core.v1.ContainerArgs],
    ) -> None:
        """A helper on every node with this accelerator, whatever taints it has."""
        labels = {"app.kubernetes.io/name": what}
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
            init_containers=list(first),
            containers=list(containers),
            volumes=volumes,
        )
        template = k8s.core.v1.PodTemplateSpecArgs(metadata=k8s.meta.v1.ObjectMetaArgs(labels=labels), spec=pod)
        k8s.apps.v1.DaemonSet(
            f"{self._name}-{what}",
            # kube-system admits privileged pods, and GKE keeps system-node-critical to it.
            metadata=k8s.meta.v1.ObjectMetaArgs(name=what, namespace="kube-system", labels=self._labels | labels),
            spec=k8s.apps.v1.DaemonSetSpecArgs(
                selector=k8s.meta.v1.LabelSelectorArgs(match_labels=labels), template=template
            ),
            opts=self._child,
        )


def _privileged(
    name: str, image: str, mounts: dict[str, str], command: Sequence[str] | None = None
) -> k8s.core.v1.ContainerArgs:
    return k8s.core.v1.ContainerArgs(
        name=name,
        image=image,
        command=list(command) if command else None,
        resources=k8s.core.v1.ResourceRequirementsArgs(requests={"cpu": "150m"}),
        security_context=k8s.core.v1.SecurityContextArgs(privileged=True),
        volume_mounts=[k8s.core.v1.VolumeMountArgs(name=volume, mount_path=path) for volume, path in mounts.items()],
    )


def _network_names() -> list[str]:
    return [f"fabric{number}" for number in range(1, 5)]


def fabric(settings: Settings) -> Fabric:
    """How a pod uses the network between GPU nodes, and the line in NCCL's log that proves it did."""
    if settings.tcpx:
        return _tcpx_fabric()
    if settings.fast_socket:
        # The plug-in lies beside the driver, which GKE mounts; NCCL finds it by the loader's path.
        env = {"LD_LIBRARY_PATH": _LIBRARIES, "NCCL_SOCKET_IFNAME": "eth0"}
        return Fabric(name="fast-socket", env=env, expected_log="NET/FastSocket")
    return Fabric(name="tcp")


def _tcpx_fabric() -> Fabric:
    """The four cards by annotation, the daemon that owns their buffers as a sidecar, the plug-in by its path."""
    interfaces = [{"interfaceName": "eth0", "network": "default"}]
    interfaces += [
        {"interfaceName": f"eth{number}", "network": name} for number, name in enumerate(_network_names(), start=1)
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
        capabilities=("IPC_LOCK",),
        mounts=(sockets, libraries),
        sidecars=(_tcpx_daemon(sockets, libraries),),
        expected_log="NET/GPUDirectTCPX",
    )


def _tcpx_daemon(sockets: Mount, libraries: Mount) -> Sidecar:
    """Manages GPU receive buffers and steers flows, for which it changes the host's network settings."""
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
