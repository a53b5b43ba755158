"""The EKS cluster: control plane, key, add-ons, nodes, the autoscaler's rights, and the Kubernetes provider."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pulumi
import pulumi_aws as aws
import pulumi_eks as eks
import pulumi_kubernetes as k8s

from infra import tunnel
from infra.clouds.aws import live, naming
from infra.clouds.aws.bastion import Bastion
from infra.clouds.aws.identity import NODES, PODS, ServiceRole, Statement, managed_policy
from infra.clouds.aws.network import Network
from infra.clouds.aws.nodes import GpuNodes, Membership, SystemNodes
from infra.clouds.aws.settings import Settings

#: The service account of the autoscaler, in kube-system.
AUTOSCALER_ACCOUNT = "cluster-autoscaler"

_LOG_TYPES = ["api", "audit", "authenticator", "controllerManager", "scheduler"]


class EksCluster(pulumi.ComponentResource):
    """Control plane, system nodes with the network add-ons, autoscaler's rights, provider; GPU nodes on request.

    `name` is the cluster's name, whose users wait for the control plane; `eks_name` is the same name without the wait:
    log groups and the autoscaler's rights need it before the cluster exists. `ready` are the resources that must exist
    before a pod can be scheduled.
    """

    eks_name: pulumi.Output[str]
    name: pulumi.Output[str]
    kubeconfig: pulumi.Output[str]
    provider: k8s.Provider
    key: aws.kms.Key
    security_group_id: pulumi.Output[str]
    ready: Sequence[pulumi.Resource]

    def __init__(
        self, name: str, settings: Settings, network: Network, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("torchrec-cloud:aws:Cluster", name, None, opts)
        self._name, self._settings, self._tags = name, settings, settings.labels
        self._child = pulumi.ResourceOptions(parent=self)
        self._base_name = naming.base_name(settings.project, name.removesuffix("-cluster"))
        running = live.find_version(self._base_name)
        if running:
            live.require_possible_upgrade(settings.stack, running, settings.cluster.kubernetes_version)
        else:
            live.require_unlisted_creator(settings.stack, settings.cluster.admin_role_arns)
        self.key = self._create_key()
        self.eks_name = self._choose_name()
        plane = self._create_control_plane(network)
        self.security_group_id = plane.cluster_security_group_id
        self.name = pulumi.Output.all(self.eks_name, self.security_group_id).apply(lambda found: str(found[0]))
        self.kubeconfig = pulumi.Output.secret(self._find_way_in(network, plane))
        self.provider = k8s.Provider(
            f"{name}-k8s",
            kubeconfig=self.kubeconfig,
            # Without it another way to the same API server would replace every object in the cluster:
            # https://github.com/pulumi/pulumi-kubernetes/blob/master/provider/pkg/provider/provider.go (DiffConfig)
            cluster_identifier=pulumi.Output.unsecret(plane.kubeconfig_json.apply(_server_name)),
            # An administrator who destroys the stack needs their own entry until the last object is deleted.
            opts=pulumi.ResourceOptions(parent=self, depends_on=self._create_admin_entries(plane)),
        )

        member = self._create_membership(network)
        self._member = member
        system = SystemNodes(f"{name}-system", settings, network, member, self._child)
        dns = self.create_addon(f"{name}-coredns", "coredns", self, after=[system])
        self.ready = (*member.before, system, dns, self._create_autoscaler_identity())
        self.register_outputs({"name": self.name, "kubeconfig": self.kubeconfig})

    def create_gpu_nodes(self, network: Network, after: Sequence[pulumi.Resource]) -> GpuNodes:
        """Create the GPU nodes after these resources, and delete them before."""
        member = replace(self._member, before=[*self._member.before, *after])
        return GpuNodes(f"{self._name}-gpu", self._settings, network, member, self._child)

    def _find_way_in(self, network: Network, plane: eks.Cluster) -> pulumi.Output[str]:
        """Return the kubeconfig for the API server's own address, or through the bastion."""
        if self._settings.network.api_access != "bastion":
            return plane.kubeconfig_json
        name, group = f"{self._name}-bastion", plane.cluster_security_group_id
        return Bastion(name, self._settings, network, plane.kubeconfig_json, group, self._child).kubeconfig

    def create_addon(
        self,
        name: str,
        addon: str,
        parent: pulumi.Resource,
        *,
        after: Sequence[pulumi.Resource] = (),
        identity: tuple[str, ServiceRole] | None = None,
        configuration: Mapping[str, object] | None = None,
    ) -> aws.eks.Addon:
        """Create an EKS add-on in EKS's default version for the cluster's Kubernetes version, which an upgrade changes.

        `identity` is a service account with the role that its pods get through EKS Pod Identity.
        """
        account, role = identity or ("", None)
        association = (
            [aws.eks.AddonPodIdentityAssociationArgs(service_account=account, role_arn=role.arn)] if role else None
        )
        return aws.eks.Addon(
            name,
            cluster_name=self.name,
            addon_name=addon,
            addon_version=live.addon_version(addon, self._settings.cluster.kubernetes_version),
            pod_identity_associations=association,
            configuration_values=json.dumps(configuration, sort_keys=True) if configuration else None,
            resolve_conflicts_on_create="OVERWRITE",
            resolve_conflicts_on_update="OVERWRITE",
            tags=self._tags,
            opts=pulumi.ResourceOptions(parent=parent, depends_on=[*after, *([role] if role else [])]),
        )

    def create_pod_role(
        self,
        name: str,
        parent: pulumi.Resource,
        *,
        managed: Sequence[str] = (),
        statements: Sequence[Statement] = (),
    ) -> ServiceRole:
        """Create a role for pods; `managed` are names of policies that AWS manages."""
        arns = [managed_policy(self._settings.partition, item) for item in managed]
        opts = pulumi.ResourceOptions(parent=parent)
        return ServiceRole(name, PODS, self._tags, opts, managed=arns, statements=statements)

    def _create_key(self) -> aws.kms.Key:
        """Create one key for the cluster's secrets and the file system, which are deleted with the stack.

        Its policy is the default of AWS: the account, which grants access through IAM. The bucket does not use this
        key: checkpoints that outlive the stack must not depend on a deleted key.
        """
        key = aws.kms.Key(
            f"{self._name}-key",
            description=f"Kubernetes secrets and shared storage of {self._base_name}",
            enable_key_rotation=True,
            deletion_window_in_days=7,
            tags=self._tags,
            opts=self._child,
        )
        alias = f"alias/{self._base_name}"
        aws.kms.Alias(f"{self._name}-alias", name=alias, target_key_id=key.key_id, opts=self._child)
        return key

    def _choose_name(self) -> pulumi.Output[str]:
        """Return a name that no earlier cluster of this stack had: the start of the key's id makes it unique.

        EKS recreates the log group of a deleted cluster, without a retention, when it writes the last lines. The next
        `up` could not create the group of a cluster of the same name:
        https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2486
        A cluster that an earlier version of this program created keeps its name, because another one replaces it.
        """
        if live.cluster_exists(self._base_name):
            return pulumi.Output.from_input(self._base_name)
        return self.key.key_id.apply(lambda key_id: naming.with_key(self._base_name, key_id))

    def _create_control_plane(self, network: Network) -> eks.Cluster:
        """Create the control plane in the private subnets; only authorised ranges can reach it from outside."""
        settings = self._settings.cluster
        # EKS would otherwise create a log group that never expires and outlives the stack.
        logs = aws.cloudwatch.LogGroup(
            f"{self._name}-logs",
            name=pulumi.Output.concat("/aws/eks/", self.eks_name, "/cluster"),
            retention_in_days=self._settings.monitoring.log_retention_days,
            tags=self._tags,
            opts=self._child,
        )
        authorized = list(self._settings.network.authorized_cidrs)
        return eks.Cluster(
            f"{self._name}-eks",
            name=self.eks_name,
            version=settings.kubernetes_version,
            vpc_id=network.vpc.id,
            private_subnet_ids=[subnet.id for subnet in network.private_subnets.values()],
            kubernetes_service_ip_address_range=self._settings.network.services_cidr,
            endpoint_private_access=True,
            endpoint_public_access=bool(authorized),
            public_access_cidrs=authorized or None,
            authentication_mode=eks.AuthenticationMode.API,
            encryption_config_key_arn=self.key.arn,
            enabled_cluster_log_types=_LOG_TYPES,
            upgrade_policy=aws.eks.ClusterUpgradePolicyArgs(support_type=settings.support.upper()),
            deletion_protection=False,
            # This stack creates add-ons and nodes itself, to order them: the network add-ons exist before the first
            # node and are deleted after the last.
            bootstrap_self_managed_addons=False,
            use_default_vpc_cni=True,
            coredns_addon_options=eks.CoreDnsAddonOptionsArgs(enabled=False),
            kube_proxy_addon_options=eks.KubeProxyAddonOptionsArgs(enabled=False),
            create_oidc_provider=False,
            skip_default_node_group=True,
            skip_default_security_groups=True,
            tags=self._tags,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[logs]),
        )

    def _create_admin_entries(self, plane: eks.Cluster) -> list[aws.eks.AccessPolicyAssociation]:
        """Give the further administrators their rights.

        Earlier versions of this program let pulumi-eks create them and numbered them, so that one removed from the list
        replaced all after it, and EKS has one entry for a principal at most.
        """
        policy = f"arn:{self._settings.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
        everywhere = aws.eks.AccessPolicyAssociationAccessScopeArgs(type="cluster")
        rights = []
        for index, arn in enumerate(self._settings.cluster.admin_role_arns):
            account, _, principal = arn.split(":", 4)[4].partition(":")
            name, numbered = f"{self._name}-eks-admin-{account}-{principal}", f"{self._name}-eks-admin-{index}"
            entry = aws.eks.AccessEntry(
                name,
                cluster_name=self.name,
                principal_arn=arn,
                tags=self._tags,
                opts=pulumi.ResourceOptions(parent=plane, aliases=[pulumi.Alias(name=numbered)]),
            )
            right = aws.eks.AccessPolicyAssociation(
                f"{name}-admin",
                cluster_name=self.name,
                principal_arn=entry.principal_arn,
                policy_arn=policy,
                access_scope=everywhere,
                opts=pulumi.ResourceOptions(parent=entry, aliases=[pulumi.Alias(name=f"{numbered}-admin")]),
            )
            rights.append(right)
        return rights

    def _create_network_addons(self) -> list[aws.eks.Addon]:
        """Create the add-ons without which no node becomes ready."""
        role = self.create_pod_role(f"{self._name}-cni", self, managed=["AmazonEKS_CNI_Policy"])
        return [
            self.create_addon(
                f"{self._name}-vpc-cni",
                "vpc-cni",
                self,
                identity=("aws-node", role),
                # Without it EKS stores NetworkPolicies and enforces none:
                # https://docs.aws.amazon.com/eks/latest/userguide/cni-network-policy-configure.html
                configuration={"enableNetworkPolicy": "true"},
            ),
            self.create_addon(f"{self._name}-kube-proxy", "kube-proxy", self),
            self.create_addon(f"{self._name}-pod-identity", "eks-pod-identity-agent", self),
        ]

    def _create_membership(self, network: Network) -> Membership:
        """Create the nodes' role, which only lets them join the cluster and pull images; pods have their own roles.

        Nodes are created after the network and its add-ons and deleted before them: a network interface left behind
        blocks the deletion of its subnet.
        """
        names = ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly")
        arns = [managed_policy(self._settings.partition, item) for item in names]
        role = ServiceRole(f"{self._name}-nodes", NODES, self._tags, self._child, managed=arns)
        before = [network, role, *self._create_network_addons()]
        return Membership(self._base_name, self.name, self.security_group_id, role, before)

    def _create_autoscaler_identity(self) -> aws.eks.PodIdentityAssociation:
        """Let the autoscaler read all groups, and resize those of this cluster."""
        partition, region = self._settings.partition, self._settings.region
        groups = f"arn:{partition}:autoscaling:{region}:*:autoScalingGroup:*:autoScalingGroupName/*"
        own = self.eks_name.apply(
            lambda name: {"StringEquals": {f"aws:ResourceTag/k8s.io/cluster-autoscaler/{name}": "owned"}}
        )
        node_groups = pulumi.Output.concat(f"arn:{partition}:eks:{region}:*:nodegroup/", self.eks_name, "/*")
        read_actions = [
            "autoscaling:DescribeAutoScalingGroups",
            "autoscaling:DescribeAutoScalingInstances",
            "autoscaling:DescribeLaunchConfigurations",
            "autoscaling:DescribeScalingActivities",
            "ec2:DescribeImages",
            "ec2:DescribeInstanceTypes",
            "ec2:DescribeLaunchTemplateVersions",
            "ec2:GetInstanceTypesFromInstanceRequirements",
        ]
        resize_actions = ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"]
        statements = [
            Statement(read_actions, ["*"]),
            Statement(["eks:DescribeNodegroup"], [node_groups]),
            Statement(resize_actions, [groups], condition=own),
        ]
        role = self.create_pod_role(f"{self._name}-autoscaler", self, statements=statements)
        return aws.eks.PodIdentityAssociation(
            f"{self._name}-autoscaler-identity",
            cluster_name=self.name,
            namespace="kube-system",
            service_account=AUTOSCALER_ACCOUNT,
            role_arn=role.arn,
            tags=self._tags,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[role]),
        )


def _server_name(kubeconfig: str) -> str:
    """Return the host name of the API server, which is unique to the cluster."""
    return tunnel.server_name(json.loads(kubeconfig)["clusters"][0]["cluster"]["server"])
