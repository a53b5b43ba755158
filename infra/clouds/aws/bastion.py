"""A small machine in the VPC through which Session Manager forwards a port to the private Kubernetes API."""

from __future__ import annotations

import asyncio
import json

import pulumi
import pulumi_aws as aws

from infra import tunnel
from infra.clouds.aws.identity import NODES, ServiceRole, managed_policy
from infra.clouds.aws.network import Network, named
from infra.clouds.aws.settings import BASTION_TYPE, BASTION_VOLUME_GIB, Settings

#: Amazon Linux 2023 has the agent of Session Manager.
_IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
_GUIDE = "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
_PROGRAMS = {
    "aws": "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    "session-manager-plugin": _GUIDE,
}


class Bastion(pulumi.ComponentResource):
    """The machine, without any inbound port, its role, and the rule that lets it reach the API server.

    `kubeconfig` is the cluster's, through a port of the machine that runs `pulumi up`. Reading it opens the tunnel.
    """

    kubeconfig: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: Network,
        kubeconfig: pulumi.Output[str],
        cluster_group: pulumi.Output[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the machine and what it may do; `cluster_group` is the security group of the API server."""
        super().__init__("torchrec-cloud:aws:Bastion", name, None, opts)
        self._name, self._settings, self._tags = name, settings, settings.labels
        self._child = pulumi.ResourceOptions(parent=self)
        group = self._create_group(network)
        rule = self._admit(group, cluster_group)
        instance = self._create_instance(network, group)
        # The rule is among the inputs so that objects in the cluster are deleted before it.
        known = pulumi.Output.all(kubeconfig, instance.id, rule.id)
        facts = known.apply(lambda values: self._describe(values[0], values[1]))
        self.kubeconfig = pulumi.Output.all(kubeconfig, facts).apply(lambda known: _open(known[0], known[1]))
        self.register_outputs({tunnel.OUTPUT: pulumi.Output.unsecret(facts)})

    def _create_group(self, network: Network) -> aws.ec2.SecurityGroup:
        """Create a group that only reaches HTTPS."""
        https = aws.ec2.SecurityGroupEgressArgs(
            description="Session Manager and the API server",
            protocol="tcp",
            from_port=443,
            to_port=443,
            cidr_blocks=["0.0.0.0/0"],
        )
        return aws.ec2.SecurityGroup(
            f"{self._name}-group",
            description="The bastion: no inbound port",
            vpc_id=network.vpc.id,
            egress=[https],
            tags=named(self._tags, f"{self._name}-group"),
            opts=self._child,
        )

    def _admit(
        self, group: aws.ec2.SecurityGroup, cluster_group: pulumi.Output[str]
    ) -> aws.vpc.SecurityGroupIngressRule:
        """Let the group reach the API server."""
        return aws.vpc.SecurityGroupIngressRule(
            f"{self._name}-api",
            security_group_id=cluster_group,
            referenced_security_group_id=group.id,
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            description="Kubernetes API from the bastion",
            tags=self._tags,
            opts=self._child,
        )

    def _create_instance(self, network: Network, group: aws.ec2.SecurityGroup) -> aws.ec2.Instance:
        """Create the machine; the newest image at its creation stays, because a newer one would replace it."""
        managed = [managed_policy(self._settings.partition, "AmazonSSMManagedInstanceCore")]
        role = ServiceRole(f"{self._name}-ssm", NODES, self._tags, self._child, managed=managed)
        profile = aws.iam.InstanceProfile(
            f"{self._name}-profile", role=role.name, tags=self._tags, opts=pulumi.ResourceOptions(parent=self)
        )
        image = aws.ssm.get_parameter_output(name=_IMAGE, opts=pulumi.InvokeOutputOptions(parent=self))
        disk = aws.ec2.InstanceRootBlockDeviceArgs(encrypted=True, volume_type="gp3", volume_size=BASTION_VOLUME_GIB)
        return aws.ec2.Instance(
            f"{self._name}-machine",
            ami=image.value,
            instance_type=BASTION_TYPE,
            subnet_id=network.gpu_subnet.id,
            vpc_security_group_ids=[group.id],
            iam_instance_profile=profile.name,
            associate_public_ip_address=False,
            metadata_options=aws.ec2.InstanceMetadataOptionsArgs(http_tokens="required", http_put_response_hop_limit=1),
            root_block_device=disk,
            tags=named(self._tags, self._name),
            volume_tags=self._tags,
            # Session Manager is reached through the NAT gateway.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[network, role], ignore_changes=["ami"]),
        )

    def _describe(self, kubeconfig: str, instance: str) -> str:
        """Return the facts of the tunnel, as the state stores them for `refresh` and `destroy`."""
        cluster = json.loads(kubeconfig)["clusters"][0]["cluster"]
        host, port = tunnel.server_name(cluster["server"]), tunnel.port_of(self._settings.project, self._settings.stack)
        parameters = {"host": [host], "portNumber": ["443"], "localPortNumber": [str(port)]}
        command = ("aws", "ssm", "start-session", "--region", self._settings.region, "--target", instance)
        document = ("--document-name", "AWS-StartPortForwardingSessionToRemoteHost")
        return tunnel.Tunnel(
            command=(*command, *document, "--parameters", json.dumps(parameters)),
            programs=_PROGRAMS,
            not_ready="TargetNotConnected",
            port=port,
            server_name=host,
            authority=cluster["certificate-authority-data"],
        ).to_json()


async def _open(kubeconfig: str, facts: str) -> str:
    """Open the tunnel until the program ends, and return the kubeconfig that uses it."""
    found = tunnel.Tunnel.from_json(facts)
    try:
        await asyncio.to_thread(tunnel.hold_until_exit, found)
    except tunnel.TunnelError as error:
        raise pulumi.RunError(str(error)) from None
    return tunnel.redirect(kubeconfig, found.port)
