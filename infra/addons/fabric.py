"""Charts that make a fabric's devices schedulable: pure functions from the contract's fields to chart values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from infra.contract import ChartRequest, CustomResource, Toleration

#: Images of the network operator's release 26.4.1 (its hack/release.yaml); they change with the chart's version.
_REPOSITORY = "nvcr.io/nvidia/mellanox"
_RELEASE = "network-operator-v26.4.1"
_DOCA_DRIVER = "doca3.4.1-26.04-1.1.0.0-1"

#: PCI device ids of ConnectX-6 and ConnectX-7 virtual functions, which virtual machines have.
_VIRTUAL_FUNCTIONS = ("101c", "101e")


def efa_device_plugin(tolerations: Sequence[Toleration], repository: str | None = None) -> ChartRequest:
    """Return the EFA device plugin; without tolerations its pods cannot run on a tainted pool.

    `repository` replaces the chart's image, which only nodes of the cloud's commercial partition can pull.
    """
    values: dict[str, object] = {"tolerations": [item.manifest for item in tolerations]}
    if repository:
        values["image"] = {"repository": repository}
    return ChartRequest("efa-device-plugin", values)


def network_operator(resource: str = "ib", *, tolerations: Sequence[Toleration] = ()) -> ChartRequest:
    """Return the network operator with a policy that installs the driver and advertises `rdma/<resource>`.

    It runs Node Feature Discovery, so a GPU operator on the same cluster must not. Its DaemonSets and those of the
    policy tolerate nvidia.com/gpu only: a pool with other taints, such as a spot pool, must pass its `tolerations`.
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
    """Return a policy that advertises each virtual function, one per GPU, as a separate device."""
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
    """Return a rule that sets the label that the operator's DaemonSets select on nodes with a virtual function."""
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
