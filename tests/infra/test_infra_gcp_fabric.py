"""Google Cloud: the networks and pods of GPUDirect-TCPX."""

from __future__ import annotations

import json

from gcp_stack import A2, A2_ULTRA, A3, CLUSTER, CUSTOM, DAEMONS, NETWORK, TRIAL, TYPES, gpu_pool_inputs, parse_settings
from provider_mocks.recording import Recording


def test_a3_high_has_four_additional_networks_with_a_large_mtu(a3: Recording) -> None:
    further = [item for item in a3.of_type(NETWORK) if item.name != "gcp-network-vpc"]
    assert [item.inputs["mtu"] for item in further] == [8244] * 4
    assert a3.one(CLUSTER).inputs["enableMultiNetworking"] is True
    ranges = {
        item.inputs["ipCidrRange"]
        for item in a3.of_type("gcp:compute/subnetwork:Subnetwork")
        if item.name != "gcp-network-subnet"
    }
    assert ranges == {"10.200.0.0/20", "10.200.16.0/20", "10.200.32.0/20", "10.200.48.0/20"}


def test_each_card_of_an_a3_node_is_in_a_kubernetes_network(a3: Recording) -> None:
    cards = gpu_pool_inputs(a3)["networkConfig"]["additionalNodeNetworkConfigs"]
    parameters = {
        item.inputs["metadata"]["name"]: item.inputs["spec"] for item in a3.of_type(f"{CUSTOM}GKENetworkParamSet")
    }
    networks = {item.inputs["metadata"]["name"]: item.inputs["spec"] for item in a3.of_type(f"{CUSTOM}Network")}
    assert set(parameters) == set(networks)
    assert [(card["network"], card["subnetwork"]) for card in cards] == [
        (parameters[name]["vpc"], parameters[name]["vpcSubnet"]) for name in sorted(parameters)
    ], "the order of cards is the order of eth1 to eth4"
    assert {spec["deviceMode"] for spec in parameters.values()} == {"NetDevice"}
    assert all(spec["parametersRef"]["name"] == name for name, spec in networks.items())
    assert {spec["type"] for spec in networks.values()} == {"Device"}


def test_destroy_deletes_the_parameters_of_a_network_after_the_network(a3: Recording) -> None:
    parameters = {item.inputs["metadata"]["name"]: item for item in a3.of_type(f"{CUSTOM}GKENetworkParamSet")}
    networks = {item.inputs["metadata"]["name"]: item for item in a3.of_type(f"{CUSTOM}Network")}
    for name, network in networks.items():
        assert a3.needs(network, parameters[name]), "a finalizer keeps parameters while a network uses them"
        assert not a3.needs(parameters[name], network), "otherwise the test passes for any order"


def test_the_names_of_the_additional_networks_do_not_change(a3: Recording) -> None:
    further = {item.name for item in a3.of_type(NETWORK)} - {"gcp-network-vpc"}
    assert further == {f"gcp-network-fabric{number}" for number in (1, 2, 3, 4)}, (
        "a changed name replaces the network and every GPU node; the golden list contains none of them"
    )


def test_a_pod_on_a3_joins_the_existing_networks(a3: Recording) -> None:
    from infra.clouds.gcp.fabric import node_fabric

    annotations = node_fabric(parse_settings({"gpu.instance_type": A3})).pod_annotations
    interfaces = json.loads(annotations["networking.gke.io/interfaces"])
    assert interfaces[0] == {"interfaceName": "eth0", "network": "default"}
    existing = sorted(item.inputs["metadata"]["name"] for item in a3.of_type(f"{CUSTOM}Network"))
    assert [item["network"] for item in interfaces[1:]] == existing
    assert [item["interfaceName"] for item in interfaces[1:]] == ["eth1", "eth2", "eth3", "eth4"]


def test_the_tcpx_daemon_gets_the_gpus_and_shares_its_sockets_with_the_trainer() -> None:
    from infra.clouds.gcp.fabric import node_fabric

    tcpx = node_fabric(parse_settings({"gpu.instance_type": A3}))
    (daemon,) = tcpx.sidecars
    assert f"devices.gke.io/container.{daemon.name}" in tcpx.pod_annotations
    shared = next(mount for mount in tcpx.mounts if mount.name == "tcpx-socket")
    assert shared in daemon.mounts
    assert shared.host_path is None, "the folder is per pod: two pods of a node must not share it"
    assert not shared.read_only
    assert tcpx.env["NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX"] == shared.mount_path
    assert shared.mount_path in daemon.command
    assert daemon.capabilities == ("NET_ADMIN",)
    assert not daemon.privileged
    assert tcpx.pod_security == "privileged"


def test_the_plugin_and_the_injector_run_on_every_a3_node_regardless_of_taints(a3: Recording) -> None:
    specs = {item.name: item.inputs["spec"]["template"]["spec"] for item in a3.of_type(DAEMONS)}
    assert set(specs) == {"gcp-tcpx-tcpx-installer", "gcp-tcpx-device-injector"}
    for spec in specs.values():
        assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
        assert spec["tolerations"] == [{"operator": "Exists"}]
        images = [item["image"] for item in [*spec["containers"], *spec.get("initContainers", [])]]
        assert all("@sha256:" in image or ":v" in image for image in images), "a mutable tag is no release"


def test_the_log_line_that_proves_the_fabric_depends_on_the_type() -> None:
    from infra.clouds.gcp.fabric import node_fabric

    expected = {A2: "NET/FastSocket", A2_ULTRA: "NET/FastSocket", A3: "NET/GPUDirectTCPX", TRIAL: ""}
    assert {name: node_fabric(parse_settings({"gpu.instance_type": name})).expected_log for name in TYPES} == expected
