"""The network of an AWS stack, and the order in which its resources are destroyed."""

from __future__ import annotations

from aws_stack import ASSOCIATION, EKS, GROUP, LUSTRE, NODES, RELEASE, Run, addons_by_name

from infra.clouds.aws.network import subnet_layout


def test_subnet_ranges_are_frozen(stack: Run) -> None:
    layout = subnet_layout("10.0.0.0/16", ["a", "b", "c"])
    assert {zone: (ranges.private, ranges.public) for zone, ranges in layout.items()} == {
        "a": ("10.0.0.0/19", "10.0.224.0/22"),
        "b": ("10.0.32.0/19", "10.0.228.0/22"),
        "c": ("10.0.64.0/19", "10.0.232.0/22"),
    }, "a range that moves replaces every node and the file system in it"
    assert subnet_layout("10.0.0.0/16", ["a", "b"]) == {key: layout[key] for key in ("a", "b")}
    found = {item.inputs["cidrBlock"] for item in stack("aws").of_type("aws:ec2/subnet:Subnet")}
    assert found == {"10.0.0.0/19", "10.0.32.0/19", "10.0.224.0/22", "10.0.228.0/22"}


def test_nodes_use_nat_for_the_internet_and_endpoints_for_s3_and_ecr(stack: Run) -> None:
    recording = stack("aws")
    route = recording.one("aws:ec2/route:Route", "aws-network-way-out").inputs
    assert route["natGatewayId"] == "aws-network-nat-id"
    endpoints = {
        item.inputs["serviceName"]: item.inputs for item in recording.of_type("aws:ec2/vpcEndpoint:VpcEndpoint")
    }
    kinds = {name.removeprefix("com.amazonaws.us-west-2."): item["vpcEndpointType"] for name, item in endpoints.items()}
    assert kinds == {"s3": "Gateway", "ecr.api": "Interface", "ecr.dkr": "Interface"}
    assert endpoints["com.amazonaws.us-west-2.s3"]["routeTableIds"] == ["aws-network-private-id"]
    assert endpoints["com.amazonaws.us-west-2.ecr.dkr"]["privateDnsEnabled"] is True


def test_no_security_group_admits_the_internet(stack: Run) -> None:
    for group in stack("aws").of_type(GROUP):
        ranges = [cidr for rule in group.inputs["ingress"] for cidr in rule.get("cidrBlocks", [])]
        assert set(ranges) <= {"10.0.0.0/16"}, group.name


def test_network_addons_and_their_rights_outlive_the_last_node(stack: Run) -> None:
    recording = stack("aws")
    rights = recording.one("aws:iam/rolePolicyAttachment:RolePolicyAttachment", "aws-cluster-cni-AmazonEKS_CNI_Policy")
    for nodes in recording.of_type(NODES):
        for name in ("vpc-cni", "kube-proxy", "eks-pod-identity-agent"):
            assert recording.needs(nodes, addons_by_name(recording)[name]), (
                "an interface left behind blocks the deletion of the subnet"
            )
        assert recording.needs(nodes, rights)


def test_the_nat_route_outlives_the_last_node(stack: Run) -> None:
    recording = stack("aws")
    for nodes in recording.of_type(NODES):
        for kind in ("natGateway:NatGateway", "route:Route", "vpcEndpoint:VpcEndpoint"):
            for item in recording.of_type(f"aws:ec2/{kind}"):
                assert recording.needs(nodes, item), f"nodes cannot join or leave the cluster without {item.name}"


def test_the_file_system_is_deleted_before_its_network_and_the_cluster(stack: Run) -> None:
    recording = stack("aws")
    file_system = recording.one(LUSTRE)
    assert recording.needs(file_system, recording.one("aws:ec2/subnet:Subnet", "aws-network-private-us-west-2a"))
    assert recording.needs(file_system, recording.one(GROUP, "aws-storage-lustre-clients"))
    assert recording.needs(recording.one(GROUP, "aws-storage-lustre-clients"), recording.one(EKS)), (
        "EKS cannot delete its security group while a rule refers to it"
    )
    link = recording.one("aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation")
    assert recording.needs(link, recording.one("aws:s3/bucket:Bucket"))


def test_operators_are_deleted_before_their_nodes(stack: Run) -> None:
    recording = stack("aws")
    for release in recording.of_type(RELEASE):
        assert recording.needs(release, recording.one(NODES, "aws-cluster-system-nodes")), release.name
        assert recording.needs(release, addons_by_name(recording)["coredns"]), release.name
    scaler = recording.one(RELEASE, "aws-addons-cluster-autoscaler")
    assert recording.needs(scaler, recording.one(ASSOCIATION, "aws-cluster-autoscaler-identity"))


def test_public_addresses_are_deleted_before_the_internet_gateway(stack: Run) -> None:
    recording = stack("aws")
    gateway = recording.one("aws:ec2/internetGateway:InternetGateway")
    for token in ("aws:ec2/eip:Eip", "aws:ec2/natGateway:NatGateway"):
        assert recording.needs(recording.one(token), gateway), "AWS does not detach a gateway that is in use"


def test_all_invalid_settings_are_reported_before_any_resource_is_registered(stack: Run) -> None:
    invalid = {
        "gpu.zone": "eu-west-1a",
        "storage.size_gib": 3600,
        "network.services_cidr": "10.0.0.0/16",
        "colour": "red",
    }
    recording = stack("aws", invalid, fails=True)
    assert all(key in str(recording.error) for key in invalid)
    assert recording.registrations == []
