"""What makes a fabric's devices schedulable; pure, from the contract's fields to chart values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from infra.contract import ChartRequest, CustomResource, Toleration

#: Images of the network operator's release 26.4.1 (its hack/release.yaml); they change with the chart's version.
_REPOSITORY = "nvcr.io/nvidia/mellanox"
_RELEASE = "network-operator-v26.4.1"
_DOCA_DRIVER = "doca3.4.1-26.04-1.1.0.0-1"

#: PCI device ids of ConnectX-6 and ConnectX-7 virtual functions, which is what a virtual machine sees.
_VIRTUAL_FUNCTIONS = ("101c", "101e")


def efa_device_plugin(tolerations: Sequence[Toleration]) -> ChartRequest:
    """The EFA device plugin; the chart tolerates nothing by default and would not run on a tainted pool."""
    return ChartRequest("efa-device-plugin", {"tolerations": [item.manifest for item in tolerations]})


def network_operator(resource: str = "ib", *, tolerations: Sequence[Toleration] = ()) -> ChartRequest:
    """The network operator with the policy that installs the InfiniBand driver and advertises `rdma/<resource>`.

    Node Feature Discovery runs here; a GPU operator beside it must leave its own off. Both it and the policy's
    DaemonSets tolerate nvidia.com/gpu only: a pool with further taints (spot) needs its `tolerations` named.
    """
    on_pool = [toleration.manifest for toleration in tolerations]
    values: dict[str, object] = {
        "nfd": {"enabled": True, "deployNodeFeatureRules": False},
        "sriovNetworkOperator": {"enabled": False},
    }
    if on_pool:
        values["node-feature-discovery"] = {"worker": {"tolerations": on_pool}}
    return ChartRequest("network-operator", values, (_nic_cluster_policy(resource, on_pool), _feature_rule()))


def _nic_cluster_policy(resource: str, tolerations: Sequence[Mapping[str, str]]) -> CustomResource:
    """One virtual function per GPU, each advertised as a device of its own."""
    selectors = {"vendors": ["15b3"], "devices": list(_VIRTUAL_FUNCTIONS), "linkTypes": ["infiniband"], "isRdma": True}
    plugin = {"resourceList": [{"resourcePrefix": "rdma", "resourceName": resource, "selectors": selectors}]}
    spec: dict[str, object] = {
        "ofedDriver": {
            "image": "doca-driver",
            "repository": _REPOSITORY,
            "version": _DOCA_DRIVER,
            "upgradePolicy": {"autoUpgrade": False},
        },
        "sriovDevicePlugin": {
            "image": "sriov-network-device-plugin",
            "repository": _REPOSITORY,
            "version": _RELEASE,
            "config": json.dumps(plugin),
        },
    }
    if tolerations:
        spec["tolerations"] = list(tolerations)
    return CustomResource("mellanox.com/v1alpha1", "NicClusterPolicy", "nic-cluster-policy", spec)


def _feature_rule() -> CustomResource:
    """Labels the nodes that have such a function; the operator's DaemonSets select that label."""
    rule = {
        "name": "infiniband-virtual-function",
        "labels": {"feature.node.kubernetes.io/pci-15b3.present": "true"},
        "matchFeatures": [
            {
                "feature": "pci.device",
                "matchExpressions": {
                    "device": {"op": "In", "value": list(_VIRTUAL_FUNCTIONS)},
                    "vendor": {"op": "In", "value": ["15b3"]},
                },
            }
        ],
    }
    return CustomResource("nfd.k8s-sigs.io/v1alpha1", "NodeFeatureRule", "infiniband", {"rules": [rule]})
