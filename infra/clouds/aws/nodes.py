"""Node groups: the launch templates that EC2 starts nodes from, and the pools of EKS on top of them."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.mime.base import MIMEBase
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText

import pulumi
import pulumi_aws as aws

from infra import catalog
from infra.clouds.aws.identity import ServiceRole
from infra.clouds.aws.network import Network, Tags, named
from infra.clouds.aws.settings import Settings
from infra.contract import GPU_LABEL, GPU_TAINT

#: What a pod that owns a node takes of the huge pages that libfabric wants, and how many pages of 2 MiB a node sets
#: aside: the EFA installer's own number. https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
HUGE_PAGES_PER_POD = "5120Mi"
_NUM_HUGE_PAGES = 5128

_CAPACITY_TYPES = {"spot": "SPOT", "capacity_block": "CAPACITY_BLOCK"}
_TEMPLATE_TAG = "k8s.io/cluster-autoscaler/node-template"

#: nodeadm of the AL2023 image: the node's local disks become one, under containers' own file systems and emptyDir.
_NODE_CONFIG = """\
---
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  instance:
    localStorage:
      strategy: RAID0
"""

#: Runs before kubelet starts, which is when kubelet counts huge pages.
_HUGE_PAGES_SCRIPT = """\
#!/bin/bash
set -euo pipefail
echo "vm.nr_hugepages = {num_pages}" > /etc/sysctl.d/90-efa-huge-pages.conf
sysctl --load /etc/sysctl.d/90-efa-huge-pages.conf
"""


@dataclass(frozen=True)
class Membership:
    """What a node needs to become a node of the cluster; its role's rights outlive it."""

    cluster_name: pulumi.Output[str]
    security_group_id: pulumi.Output[str]
    role: ServiceRole
    before: Sequence[pulumi.Resource]


def user_data(num_huge_pages: int) -> str:
    """The MIME document of a GPU node in base64: its disks, and its huge pages where it needs some.

    EKS merges its own part in. The boundary is fixed: a random one would replace every node at every `pulumi up`.
    """
    document = MIMEMultipart(boundary="torchrec-cloud")
    config = MIMEBase("application", "node.eks.aws")
    config.set_payload(_NODE_CONFIG)
    document.attach(config)
    if num_huge_pages:
        script = _HUGE_PAGES_SCRIPT.format(num_pages=num_huge_pages)
        document.attach(MIMEText(script, "x-shellscript", "us-ascii"))
    return base64.b64encode(document.as_bytes()).decode()


def efa_interfaces(
    num_cards: int, groups: Sequence[pulumi.Input[str]]
) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """One EFA interface on every network card; only the first carries IP traffic, so only it takes an address.

    Security groups named here replace those that EKS would add, so the cluster's own must be among them. No public
    address is asked for: with several interfaces EC2 refuses even the question, and the subnet hands out none.
    """
    return [
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=card,
            device_index=0 if card == 0 else 1,
            interface_type="efa" if card == 0 else "efa-only",
            delete_on_termination="true",
            security_groups=list(groups),
        )
        for card in range(num_cards)
    ]


def node_labels(settings: Settings) -> dict[str, str]:
    """Labels of GPU nodes.

    The autoscaler takes a node for a GPU node by the accelerator's label only. Without it, it judges a node in full
    training by its idle CPUs and takes it away.
    """
    model = catalog.instance(settings.cloud, settings.gpu.instance_type).gpu_model
    return {**GPU_LABEL, "k8s.amazonaws.com/accelerator": "nvidia-" + model.lower().replace(" ", "-")}


def node_template_tags(settings: Settings) -> dict[str, str]:
    """What a GPU node would look like, for an autoscaler that has none to look at."""
    num_gpus = catalog.instance(settings.cloud, settings.gpu.instance_type).num_gpus
    resources = {"nvidia.com/gpu": str(num_gpus)}
    if settings.num_efa_interfaces:
        resources["vpc.amazonaws.com/efa"] = str(settings.num_efa_interfaces)
        resources["hugepages-2Mi"] = f"{_NUM_HUGE_PAGES * 2}Mi"
    return {
        **{f"{_TEMPLATE_TAG}/label/{key}": value for key, value in node_labels(settings).items()},
        f"{_TEMPLATE_TAG}/taint/{GPU_TAINT.key}": f"{GPU_TAINT.value}:{GPU_TAINT.effect}",
        **{f"{_TEMPLATE_TAG}/resources/{key}": value for key, value in resources.items()},
    }


class GpuNodes(pulumi.ComponentResource):
    """The node group that trains, from a launch template of our own.

    EKS's own templates know neither EFA on every card nor a reservation beside a placement group.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: Network,
        member: Membership,
        opts: pulumi.ResourceOptions,
    ) -> None:
        super().__init__("torchrec-cloud:aws:GpuNodes", name, None, opts)
        self._name, self._settings, self._tags = name, settings, settings.labels
        self._child = pulumi.ResourceOptions(parent=self)
        template = self._template(network, member)
        group = self._group(network, member, template)
        self._autoscaler_tags(group)
        self.register_outputs({"node_group": group.id})

    def _template(self, network: Network, member: Membership) -> aws.ec2.LaunchTemplate:
        """How EC2 starts a GPU node."""
        gpu, num_efa = self._settings.gpu, self._settings.num_efa_interfaces
        groups = [member.security_group_id, *([network.efa_group.id] if network.efa_group else [])]
        placement = network.placement_group
        return aws.ec2.LaunchTemplate(
            f"{self._name}-template",
            instance_type=gpu.instance_type,
            user_data=user_data(num_huge_pages=_NUM_HUGE_PAGES if num_efa else 0),
            network_interfaces=efa_interfaces(num_efa, groups) or None,
            placement=aws.ec2.LaunchTemplatePlacementArgs(group_name=placement.name) if placement else None,
            instance_market_options=_market(gpu.capacity),
            capacity_reservation_specification=_reservation(gpu.reservation_id),
            block_device_mappings=[_root_volume(gpu.root_volume_gib)],
            metadata_options=_metadata_options(),
            tag_specifications=_tag_specifications(named(self._tags, self._name)),
            update_default_version=True,
            tags=self._tags,
            opts=self._child,
        )

    def _group(self, network: Network, member: Membership, template: aws.ec2.LaunchTemplate) -> aws.eks.NodeGroup:
        """The group, in one subnet. Its type stands in the template, so `instance_types` stays unset here.

        After the start the autoscaler owns the number of nodes: `pulumi up` must not take nodes from a running job.
        An update ends a node before it starts the next: a spare machine of these types is rarely to be had meanwhile.
        """
        nodes = self._settings.gpu.nodes
        return aws.eks.NodeGroup(
            f"{self._name}-nodes",
            cluster_name=member.cluster_name,
            node_role_arn=member.role.arn,
            subnet_ids=[network.gpu_subnet.id],
            ami_type="AL2023_x86_64_NVIDIA",
            version=self._settings.cluster.kubernetes_version,
            capacity_type=_CAPACITY_TYPES.get(self._settings.gpu.capacity, "ON_DEMAND"),
            launch_template=_latest(template),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=nodes.min, desired_size=nodes.desired, max_size=nodes.max
            ),
            labels=node_labels(self._settings),
            taints=[aws.eks.NodeGroupTaintArgs(key=GPU_TAINT.key, value=GPU_TAINT.value, effect="NO_SCHEDULE")],
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1, update_strategy="MINIMAL"),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            tags=self._tags,
            opts=pulumi.ResourceOptions(
                parent=self, depends_on=list(member.before), ignore_changes=["scalingConfig.desiredSize"]
            ),
        )

    def _autoscaler_tags(self, group: aws.eks.NodeGroup) -> None:
        """Tell the autoscaler what a node would offer while there is none to look at."""
        for key, value in node_template_tags(self._settings).items():
            kind = re.sub(r"[^a-z0-9]+", "-", key.removeprefix(f"{_TEMPLATE_TAG}/").lower())
            aws.autoscaling.Tag(
                f"{self._name}-tag-{kind}",
                autoscaling_group_name=group.resources.apply(_autoscaling_group),
                tag=aws.autoscaling.TagTagArgs(key=key, value=value, propagate_at_launch=False),
                opts=self._child,
            )


class SystemNodes(pulumi.ComponentResource):
    """Two or more small nodes, spread over all zones, for everything but training."""

    def __init__(
        self, name: str, settings: Settings, network: Network, member: Membership, opts: pulumi.ResourceOptions
    ) -> None:
        super().__init__("torchrec-cloud:aws:SystemNodes", name, None, opts)
        wanted, child = settings.system, pulumi.ResourceOptions(parent=self)
        template = aws.ec2.LaunchTemplate(
            f"{name}-template",
            instance_type=wanted.instance_type,
            block_device_mappings=[_root_volume(wanted.root_volume_gib)],
            metadata_options=_metadata_options(),
            tag_specifications=_tag_specifications(named(settings.labels, name)),
            update_default_version=True,
            tags=settings.labels,
            opts=child,
        )
        group = aws.eks.NodeGroup(
            f"{name}-nodes",
            cluster_name=member.cluster_name,
            node_role_arn=member.role.arn,
            subnet_ids=[subnet.id for subnet in network.private_subnets.values()],
            ami_type="AL2023_x86_64_STANDARD",
            version=settings.cluster.kubernetes_version,
            launch_template=_latest(template),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=wanted.num_nodes, desired_size=wanted.num_nodes, max_size=wanted.num_nodes
            ),
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            tags=settings.labels,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(member.before)),
        )
        self.register_outputs({"node_group": group.id})


def _latest(template: aws.ec2.LaunchTemplate) -> aws.eks.NodeGroupLaunchTemplateArgs:
    """A changed template becomes a new version, and that an update of the group, node by node."""
    return aws.eks.NodeGroupLaunchTemplateArgs(id=template.id, version=template.latest_version.apply(str))


def _autoscaling_group(resources: Sequence[aws.eks.outputs.NodeGroupResource]) -> str:
    """The name of the group behind a node group."""
    groups = resources[0].autoscaling_groups
    assert groups
    assert groups[0].name
    return groups[0].name


def _market(capacity: str) -> aws.ec2.LaunchTemplateInstanceMarketOptionsArgs | None:
    """Spot is asked for on the node group; a capacity block must be asked for here as well."""
    if capacity != "capacity_block":
        return None
    return aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block")


def _reservation(reservation_id: str | None) -> aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs | None:
    """The one reservation or capacity block that nodes may come from."""
    if reservation_id is None:
        return None
    target = aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
        capacity_reservation_id=reservation_id
    )
    return aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(capacity_reservation_target=target)


def _root_volume(size_gib: int) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    """Encrypted with the account's own EBS key: EC2's autoscaling may not use a key of ours without a grant."""
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name="/dev/xvda",
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_type="gp3", volume_size=size_gib, encrypted="true", delete_on_termination="true"
        ),
    )


def _metadata_options() -> aws.ec2.LaunchTemplateMetadataOptionsArgs:
    """IMDSv2 only. Two hops, since agents in pods read the instance's identity; the node's role has no data to lose."""
    return aws.ec2.LaunchTemplateMetadataOptionsArgs(
        http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=2
    )


def _tag_specifications(tags: Tags) -> list[aws.ec2.LaunchTemplateTagSpecificationArgs]:
    """Tags of what a template starts: EKS passes a node group's own tags on to nothing."""
    kinds = ("instance", "volume", "network-interface")
    return [aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=dict(tags)) for kind in kinds]
