"""Simulated minutes of the operations that take long in a cloud; everything else takes none.

These are usual values, rounded, and no limits. They show what a phase of a story waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from engine_values import at
from engine_world import Inputs, Rules

_RELEASE = "kubernetes:helm.sh/v3:Release"
_A = "azure-native:"


@dataclass(frozen=True)
class Minutes:
    """The duration of a create, of a deletion, and of an update that changes one of the `slow` paths."""

    create: float = 0
    delete: float = 0
    update: float = 0
    slow: tuple[str, ...] = ()


MINUTES: Mapping[str, Minutes] = {
    "aws:eks/cluster:Cluster": Minutes(10, 3, 10, ("version",)),
    "aws:eks/nodeGroup:NodeGroup": Minutes(3, 5, 8, ("version", "releaseVersion", "launchTemplate")),
    "aws:eks/addon:Addon": Minutes(1, 0.5, 1, ("addonVersion", "configurationValues")),
    "aws:ec2/natGateway:NatGateway": Minutes(2, 1),
    "aws:ec2/vpcEndpoint:VpcEndpoint": Minutes(1, 1),
    "aws:fsx/lustreFileSystem:LustreFileSystem": Minutes(12, 5, 20, ("storageCapacity",)),
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation": Minutes(5, 2),
    f"{_A}containerservice:ManagedCluster": Minutes(6, 5, 10, ("kubernetesVersion",)),
    f"{_A}containerservice:AgentPool": Minutes(4, 4, 10, ("orchestratorVersion",)),
    f"{_A}netapp:CapacityPool": Minutes(2, 1),
    f"{_A}netapp:CapacityPoolVolume": Minutes(8, 3),
    f"{_A}network:PrivateEndpoint": Minutes(1, 1),
    f"{_A}dashboard:Grafana": Minutes(4, 3),
    "gcp:container/cluster:Cluster": Minutes(8, 4, 10, ("minMasterVersion",)),
    "gcp:container/nodePool:NodePool": Minutes(3, 4, 8, ("version",)),
    "gcp:filestore/instance:Instance": Minutes(6, 2, 3, ("fileShares",)),
    "gcp:projects/service:Service": Minutes(0.5),
    # Measured by `make test-node` (tests/README.md): 1,037 s on two cores.
    "docker-build:index:Image": Minutes(15, 0, 15, ("context", "dockerfile", "buildArgs", "tags", "target")),
    _RELEASE: Minutes(1, 0.5, 1, ("version", "values")),
    "kubernetes:core/v1:Namespace": Minutes(0, 0.5),
}
#: Charts that wait for several images, or for the driver of a GPU node.
_CHART_MINUTES = {"kube-prometheus-stack": 3.0, "gpu-operator": 3.0, "network-operator": 2.0}


def with_minutes(token: str, rules: Rules) -> Rules:
    """Return the rules with the durations of their type, unless they have their own."""
    minutes = MINUTES.get(token)
    if minutes is None:
        return rules

    def created(inputs: Inputs) -> float:
        return _CHART_MINUTES.get(str(inputs.get("chart")), minutes.create)

    def updated(old: Inputs, new: Inputs) -> float:
        return minutes.update if any(at(old, path) != at(new, path) for path in minutes.slow) else 0.0

    table = {"create_minutes": created, "update_minutes": updated, "delete_minutes": lambda inputs: minutes.delete}
    defaults = {one.name: one.default for one in fields(Rules)}
    own = {name for name in table if getattr(rules, name) is not defaults[name]}
    return replace(rules, **{name: value for name, value in table.items() if name not in own})
