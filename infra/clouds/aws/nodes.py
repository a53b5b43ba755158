"""Node groups: EKS node pools and the EC2 launch templates that start their nodes."""

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
from infra.clouds.aws import live, versions
from infra.clouds.aws.identity import ServiceRole
from infra.clouds.aws.network import Network, Tags, named
from infra.clouds.aws.settings import Settings
from infra.contract import GPU_LABEL, GPU_TAINT

#: Huge pages that a pod with a whole node requests for libfabric, and the number of 2 MiB pages that a node reserves,
#: which is the EFA installer's number: https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
HUGE_PAGES_PER_POD = "5120Mi"
_NUM_HUGE_PAGES = 5128

_CAPACITY_TYPES = {"spot": "SPOT", "capacity_block": "CAPACITY_BLOCK"}
_TEMPLATE_TAG = "k8s.io/cluster-autoscaler/node-template"

#: Configures nodeadm of the AL2023 image: the local disks form one RAID 0 for container file systems and emptyDir.
_NODE_CONFIG = """\
---
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  instance:
    localStorage:
      strategy: RAID0
"""

#: libfabric registers memory with the cards, which counts as locked. A container inherits containerd's limit, 8 MiB, so
#: EFA fails with "Cannot allocate memory" (awslabs/awsome-distributed-ai#647); Bottlerocket raises it on EFA nodes too.
#: 1 PiB instead of "unlimited": nodeadm merges numbers as float64, which cannot hold 2^64-1, and containerd would not
#: start. The limit of open files repeats nodeadm's default, because this list replaces the default list.
_LOCKED_MEMORY_CONFIG = f"""\
  containerd:
    baseRuntimeSpec:
      process:
        rlimits:
          - {{type: RLIMIT_NOFILE, soft: 65536, hard: 1048576}}
          - {{type: RLIMIT_MEMLOCK, soft: {2**50}, hard: {2**50}}}
"""

#: Runs before kubelet starts, because kubelet counts huge pages at its start.
_HUGE_PAGES_SCRIPT = """\
#!/bin/bash
set -euo pipefail
echo "vm.nr_hugepages = {num_pages}" > /etc/sysctl.d/90-efa-huge-pages.conf
sysctl --load /etc/sysctl.d/90-efa-huge-pages.conf
"""


@dataclass(frozen=True)
class Membership:
    """What a node needs to join the cluster. `before` must exist before the first node, and until the last is gone.

    `cluster_base_name` is the cluster's name without the suffix of newer stacks.
    """

    cluster_base_name: str
    cluster_name: pulumi.Output[str]
    security_group_id: pulumi.Output[str]
    role: ServiceRole
    before: Sequence[pulumi.Resource]


def user_data(num_huge_pages: int) -> str:
    """Return a GPU node's user data, a MIME document in base64: its disks, and with EFA huge pages and locked memory.

    EKS merges its own part into it. The boundary is fixed: a random one would replace every node at every `pulumi up`.
    """
    document = MIMEMultipart(boundary="torchrec-cloud")
    config = MIMEBase("application", "node.eks.aws")
    config.set_payload(_NODE_CONFIG + (_LOCKED_MEMORY_CONFIG if num_huge_pages else ""))
    document.attach(config)
    if num_huge_pages:
        script = _HUGE_PAGES_SCRIPT.format(num_pages=num_huge_pages)
        document.attach(MIMEText(script, "x-shellscript", "us-ascii"))
    return base64.b64encode(document.as_bytes()).decode()


def efa_interfaces(
    num_cards: int, groups: Sequence[pulumi.Input[str]]
) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """Return one EFA interface for each network card; only the first carries IP traffic and has an address.

    These security groups replace those of EKS, so the cluster's own group must be among them. The
    public-address option stays unset: EC2 rejects it with several interfaces, and the subnet assigns none.
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
    """Return the labels of GPU nodes.

    The autoscaler recognises a GPU node only by the accelerator label. Without the label it removes a node that is
    training because its CPUs are idle.
    """
    model = catalog.instance(settings.cloud, settings.gpu.instance_type).gpu_model
    return {**GPU_LABEL, "k8s.amazonaws.com/accelerator": "nvidia-" + model.lower().replace(" ", "-")}


def node_template_tags(settings: Settings) -> dict[str, str]:
    """Return tags that describe a GPU node to the autoscaler while the group has no node."""
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
    """The node group of the GPU nodes, from a custom launch template.

    The default templates of EKS support neither EFA on every card nor a reservation with a placement group.
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
        template = self._create_template(network, member)
        group = self._create_group(network, member, template)
        self._create_autoscaler_tags(group)
        self.register_outputs({"node_group": group.id})

    def _create_template(self, network: Network, member: Membership) -> aws.ec2.LaunchTemplate:
        """Create the launch template from which EC2 starts GPU nodes."""
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

    def _create_group(
        self, network: Network, member: Membership, template: aws.ec2.LaunchTemplate
    ) -> aws.eks.NodeGroup:
        """Create the group in one subnet; `instance_types` stays unset because the template names the type.

        After the start the autoscaler owns the number of nodes: `pulumi up` must not remove nodes from a running job.
        An update stops a node before it starts the next: spare machines of these types are rarely available.
        """
        name, nodes = f"{self._name}-nodes", self._settings.gpu.nodes
        running = live.find_scaling(member.cluster_base_name, name)
        scaling, ignores_size = live.plan_scaling(
            (nodes.min, nodes.max), self._settings.num_nodes_at_start, running, self._settings.stack
        )
        return aws.eks.NodeGroup(
            name,
            cluster_name=member.cluster_name,
            node_role_arn=member.role.arn,
            subnet_ids=[network.gpu_subnet.id],
            ami_type=versions.GPU_AMI,
            version=self._settings.cluster.kubernetes_version,
            release_version=self._settings.gpu.ami_release,
            capacity_type=_CAPACITY_TYPES.get(self._settings.gpu.capacity, "ON_DEMAND"),
            launch_template=_latest(template),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=scaling.num_min, desired_size=scaling.num_desired, max_size=scaling.num_max
            ),
            labels=node_labels(self._settings),
            taints=[aws.eks.NodeGroupTaintArgs(key=GPU_TAINT.key, value=GPU_TAINT.value, effect="NO_SCHEDULE")],
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1, update_strategy="MINIMAL"),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            tags=self._tags,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(member.before),
                ignore_changes=["scalingConfig.desiredSize"] if ignores_size else [],
            ),
        )

    def _create_autoscaler_tags(self, group: aws.eks.NodeGroup) -> None:
        """Describe a node's resources to the autoscaler while the group has no node."""
        stack = self._settings.stack
        name = group.resources.apply(_autoscaling_group)
        groups = pulumi.Output.all(group.urn, group.status, name).apply(lambda found: _require_usable(stack, *found))
        for key, value in node_template_tags(self._settings).items():
            kind = re.sub(r"[^a-z0-9]+", "-", key.removeprefix(f"{_TEMPLATE_TAG}/").lower())
            aws.autoscaling.Tag(
                f"{self._name}-tag-{kind}",
                autoscaling_group_name=groups,
                tag=aws.autoscaling.TagTagArgs(key=key, value=value, propagate_at_launch=False),
                opts=self._child,
            )


class SystemNodes(pulumi.ComponentResource):
    """Two or more small nodes, spread over all zones, for everything except training."""

    def __init__(
        self, name: str, settings: Settings, network: Network, member: Membership, opts: pulumi.ResourceOptions
    ) -> None:
        super().__init__("torchrec-cloud:aws:SystemNodes", name, None, opts)
        system, child = settings.system, pulumi.ResourceOptions(parent=self)
        template = aws.ec2.LaunchTemplate(
            f"{name}-template",
            instance_type=system.instance_type,
            block_device_mappings=[_root_volume(system.root_volume_gib)],
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
            ami_type=versions.SYSTEM_AMI,
            version=settings.cluster.kubernetes_version,
            release_version=system.ami_release,
            launch_template=_latest(template),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=system.num_nodes, desired_size=system.num_nodes, max_size=system.num_nodes
            ),
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1),
            node_repair_config=aws.eks.NodeGroupNodeRepairConfigArgs(enabled=True),
            tags=settings.labels,
            opts=pulumi.ResourceOptions(parent=self, depends_on=list(member.before)),
        )
        self.register_outputs({"node_group": group.id})


def _latest(template: aws.ec2.LaunchTemplate) -> aws.eks.NodeGroupLaunchTemplateArgs:
    """Return the newest version of a template, so that a changed template updates the group node by node."""
    return aws.eks.NodeGroupLaunchTemplateArgs(id=template.id, version=template.latest_version.apply(str))


def _require_usable(stack: str, urn: str, status: str, name: str) -> str:
    """Return a group's name, or raise RunError if the creation of its node group failed: it never starts a node.

    The engine retries a failed creation as an update without changes, which succeeds:
    https://github.com/pulumi/pulumi/issues/17881
    """
    if status == "CREATE_FAILED":
        raise pulumi.RunError(
            f"the GPU node group is in the state CREATE_FAILED and will never start a node. Fix the cause "
            f"(python -m infra doctor --stack {stack}), then: python -m infra up --stack {stack} --replace '{urn}'"
        )
    return name


def _autoscaling_group(resources: Sequence[aws.eks.outputs.NodeGroupResource]) -> str:
    """Return the name of the Auto Scaling group behind a node group, empty for a group without one."""
    groups = resources[0].autoscaling_groups if resources else None
    return (groups[0].name if groups else None) or ""


def _market(capacity: str) -> aws.ec2.LaunchTemplateInstanceMarketOptionsArgs | None:
    """Return the market of a capacity block; spot is requested on the node group alone."""
    if capacity != "capacity_block":
        return None
    return aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block")


def _reservation(reservation_id: str | None) -> aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs | None:
    """Return the reservation or capacity block that nodes must use, None without one."""
    if reservation_id is None:
        return None
    target = aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
        capacity_reservation_id=reservation_id
    )
    return aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(capacity_reservation_target=target)


def _root_volume(size_gib: int) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    """Return a volume encrypted with the account's EBS key: Auto Scaling needs a grant to use a customer key."""
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name="/dev/xvda",
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_type="gp3", volume_size=size_gib, encrypted="true", delete_on_termination="true"
        ),
    )


def _metadata_options() -> aws.ec2.LaunchTemplateMetadataOptionsArgs:
    """Require IMDSv2, with two hops because agents in pods read the instance's identity."""
    return aws.ec2.LaunchTemplateMetadataOptionsArgs(
        http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=2
    )


def _tag_specifications(tags: Tags) -> list[aws.ec2.LaunchTemplateTagSpecificationArgs]:
    """Return tags for what a template starts, because EKS does not propagate a node group's tags."""
    kinds = ("instance", "volume", "network-interface")
    return [aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=dict(tags)) for kind in kinds]
