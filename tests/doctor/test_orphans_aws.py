"""What a stack can leave in an AWS account, against moto: found, compared with the state, gone after its command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_commands
import boto3
import pytest
from doctor_answers import Recorded, read_context

from infra.clouds.aws import doctor, orphans
from infra.findings.model import Context, Finding
from infra.findings.orphans import Leftover
from infra.orphans.search import compare, run

DELETE = {"storage.on_destroy": "delete"}
TAGS = {"project": "torchrec-cloud", "stack": "aws", "managed-by": "pulumi"}
#: Another stack, whose name begins with this one's.
OTHERS = TAGS | {"stack": "aws-eval"}
CLUSTER = "torchrec-cloud-aws"
TRUST = json.dumps({"Version": "2012-10-17", "Statement": []})
ROLE = "arn:aws:iam::123456789012:role/eks"


def pairs(tags: dict[str, str]) -> list[dict[str, str]]:
    """Return tags as most services take them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def spec(kind: str, tags: dict[str, str]) -> list[dict[str, Any]]:
    """Return tags as EC2 takes them at creation."""
    return [{"ResourceType": kind, "Tags": pairs(tags)}]


@pytest.fixture(scope="module")
def account(server: str) -> Iterator[Callable[[str], Any]]:
    """Set up an empty account in the environment and return a function that opens a client of us-west-2."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL": server,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_DEFAULT_REGION": "us-west-2",
        }.items():
            patch.setenv(key, value)
        yield boto3.client


def search(context: Context) -> tuple[list[Leftover], list[Finding]]:
    """Run all searches of a stack and return what they found, and the findings of those that failed."""
    found, findings = run(orphans.searches(context), doctor.checks(context)[0], "test")
    return found, [item for item in findings if item.status != "ok"]


def make_network(open_client: Callable[[str], Any], tags: dict[str, str]) -> dict[str, str]:
    """Create a network with all that a stack has in it, and return the ids by kind."""
    ec2 = open_client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=spec("vpc", tags))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24", TagSpecifications=spec("subnet", tags))["Subnet"]
    gateway = ec2.create_internet_gateway(TagSpecifications=spec("internet-gateway", tags))["InternetGateway"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    table = ec2.create_route_table(VpcId=vpc, TagSpecifications=spec("route-table", tags))["RouteTable"]
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=spec("elastic-ip", tags))["AllocationId"]
    nat = ec2.create_nat_gateway(
        SubnetId=subnet["SubnetId"], AllocationId=address, TagSpecifications=spec("natgateway", tags)
    )["NatGateway"]
    group = ec2.create_security_group(
        GroupName=f"efa-{tags['stack']}", Description="EFA", VpcId=vpc, TagSpecifications=spec("security-group", tags)
    )["GroupId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc,
        ServiceName="com.amazonaws.us-west-2.ecr.api",
        VpcEndpointType="Interface",
        SubnetIds=[subnet["SubnetId"]],
        TagSpecifications=spec("vpc-endpoint", tags),
    )["VpcEndpoint"]
    template = ec2.create_launch_template(
        LaunchTemplateName=f"gpu-{tags['stack']}",
        LaunchTemplateData={"InstanceType": "p4d.24xlarge"},
        TagSpecifications=spec("launch-template", tags),
    )["LaunchTemplate"]
    return {
        "VPC": vpc, "subnet": subnet["SubnetId"], "internet gateway": gateway["InternetGatewayId"],
        "route table": table["RouteTableId"], "public address": address, "NAT gateway": nat["NatGatewayId"],
        "security group": group, "VPC endpoint": endpoint["VpcEndpointId"],
        "launch template": template["LaunchTemplateId"],
    }  # fmt: skip


def make_machines(open_client: Callable[[str], Any], subnet: str, tags: dict[str, str], cluster: str) -> dict[str, str]:
    """Create what a cluster makes itself, with the tags that its parts really set, and return the ids by kind."""
    ec2 = open_client("ec2")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    instance = ec2.run_instances(
        ImageId=image, MinCount=1, MaxCount=1, InstanceType="p4d.24xlarge", SubnetId=subnet,
        TagSpecifications=spec("instance", {"eks:cluster-name": cluster}),
    )["Instances"][0]  # fmt: skip
    card = ec2.create_network_interface(
        SubnetId=subnet, TagSpecifications=spec("network-interface", {"cluster.k8s.amazonaws.com/name": cluster})
    )["NetworkInterface"]
    volume = ec2.create_volume(
        AvailabilityZone="us-west-2a", Size=100, VolumeType="gp3", TagSpecifications=spec("volume", tags)
    )["VolumeId"]
    snapshot = ec2.create_snapshot(
        VolumeId=volume, TagSpecifications=spec("snapshot", {f"kubernetes.io/cluster/{cluster}": "owned"})
    )["SnapshotId"]
    elb = open_client("elbv2")
    balancer = elb.create_load_balancer(
        Name=f"grafana-{tags['stack']}",
        Subnets=[subnet],
        Type="network",
        Tags=pairs({"elbv2.k8s.aws/cluster": cluster}),
    )["LoadBalancers"][0]
    target = elb.create_target_group(Name=f"t-{tags['stack']}", Protocol="HTTP", Port=80, VpcId=balancer["VpcId"])
    arn = target["TargetGroups"][0]["TargetGroupArn"]
    elb.add_tags(ResourceArns=[arn], Tags=pairs({"elbv2.k8s.aws/cluster": cluster}))
    open_client("elb").create_load_balancer(
        LoadBalancerName=f"old-{tags['stack']}",
        Listeners=[{"Protocol": "tcp", "LoadBalancerPort": 80, "InstancePort": 80}],
        AvailabilityZones=["us-west-2a"],
        Tags=pairs({f"kubernetes.io/cluster/{cluster}": "owned"}),
    )
    return {
        "instance": instance["InstanceId"], "network interface": card["NetworkInterfaceId"], "volume": volume,
        "snapshot": snapshot, "load balancer": balancer["LoadBalancerName"],
        "target group": f"t-{tags['stack']}", "classic load balancer": f"old-{tags['stack']}",
    }  # fmt: skip


def make_services(open_client: Callable[[str], Any], tags: dict[str, str], cluster: str) -> dict[str, str]:
    """Create the cluster, data, logs, rights and the key, and return the ids by kind."""
    stack = tags["stack"]
    eks, fsx, iam, kms = (open_client(name) for name in ("eks", "fsx", "iam", "kms"))
    subnet = "subnet-0123456789abcdef0"
    eks.create_cluster(name=cluster, roleArn=ROLE, resourcesVpcConfig={"subnetIds": [subnet]}, tags=tags)
    eks.create_nodegroup(clusterName=cluster, nodegroupName=f"{stack}-gpu", nodeRole=ROLE, subnets=[subnet])
    lustre = {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250}
    system = fsx.create_file_system(
        FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=[subnet], Tags=pairs(tags), LustreConfiguration=lustre
    )["FileSystem"]["FileSystemId"]
    backup = fsx.create_backup(FileSystemId=system, Tags=pairs(tags))["Backup"]["BackupId"]
    open_client("logs").create_log_group(logGroupName=f"/aws/eks/{cluster}/cluster")
    open_client("ecr").create_repository(repositoryName=f"{stack}-trainer", tags=pairs(tags))
    role = f"{stack}-nodes-role-1234567"
    iam.create_role(RoleName=role, AssumeRolePolicyDocument=TRUST, Tags=pairs(tags))
    allow = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::b"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
    iam.put_role_policy(RoleName=role, PolicyName="inline", PolicyDocument=document)
    key = kms.create_key(Tags=[{"TagKey": name, "TagValue": value} for name, value in tags.items()])["KeyMetadata"]
    open_client("s3").create_bucket(
        Bucket=f"{stack}-bucket-1234567", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    open_client("s3").put_bucket_tagging(Bucket=f"{stack}-bucket-1234567", Tagging={"TagSet": pairs(tags)})
    return {
        "cluster": cluster, "node group": f"{stack}-gpu", "file system": system, "file system backup": backup,
        "log group": f"/aws/eks/{cluster}/cluster", "image repository": f"{stack}-trainer", "IAM role": role,
        "KMS key": key["KeyId"], "bucket": f"{stack}-bucket-1234567",
    }  # fmt: skip


@dataclass(frozen=True)
class Searched:
    """The results of searches of one account: while it was empty, and with one resource of each kind."""

    before: tuple[list[Leftover], list[Finding]]
    ids: dict[str, str]
    found: list[Leftover]
    failed: list[Finding]


@pytest.fixture(scope="module")
def searched(account: Callable[[str], Any]) -> Searched:
    """Create one resource of each kind for this stack and for another one, and search for this one's."""
    before, ids = search(read_context("aws")), dict[str, str]()
    for tags, cluster in ((OTHERS, f"{CLUSTER}-eval"), (TAGS, CLUSTER)):
        network = make_network(account, tags)
        ids = network | make_machines(account, network["subnet"], tags, cluster) | make_services(account, tags, cluster)
    return Searched(before, ids, *search(read_context("aws")))


def test_an_empty_account_has_no_orphan(searched: Searched) -> None:
    assert searched.before == ([], [])


def test_every_kind_is_found_and_nothing_of_another_stack(searched: Searched) -> None:
    assert not searched.failed
    assert {item.kind: item.id for item in searched.found} == searched.ids
    assert len(searched.found) == len(searched.ids), "a resource of another stack was found"


def test_prices_are_those_of_the_cost_table(searched: Searched) -> None:
    prices = {item.kind: item.usd_per_hour for item in searched.found}
    assert prices["instance"] == pytest.approx(21.957642), "an idle p4d.24xlarge"
    assert prices["file system"] == pytest.approx(1200 * 0.21 / 730)
    assert prices["volume"] == pytest.approx(100 * 0.08 / 730)
    assert prices["cluster"] == pytest.approx(0.10)
    assert prices["VPC"] is None, "a VPC is free"


def test_what_the_state_knows_and_what_its_cluster_makes_is_no_orphan(searched: Searched) -> None:
    state = [{"type": "aws:ec2/vpc:Vpc", "id": searched.ids["VPC"]}]
    orphaned, kept = compare(searched.found, state, orphans)
    assert {item.kind for item in orphaned} == set(searched.ids) - {"VPC", "bucket"}
    assert [item.kind for item in kept] == ["bucket"], "storage.on_destroy is keep"
    cluster = {"type": orphans.CLUSTER, "id": CLUSTER, "outputs": {"arn": "arn:aws:eks:us-west-2:1:cluster/x"}}
    with_cluster, _ = compare(searched.found, [*state, cluster], orphans)
    made = {item.kind for item in orphaned} - {item.kind for item in with_cluster}
    assert made >= {"instance", "network interface", "volume", "load balancer", "log group", "cluster"}
    assert "file system" not in made, "only `up` creates a file system"


def test_a_bucket_is_an_orphan_when_destroy_should_have_deleted_it(searched: Searched) -> None:
    (query,) = (item for item in orphans.searches(read_context("aws", DELETE)) if item.kind == "bucket")
    (bucket,) = query.run()
    assert bucket.id == searched.ids["bucket"]
    assert bucket.kept == ""


def test_the_printed_commands_remove_everything_from_top_to_bottom(searched: Searched) -> None:
    for item in searched.found:
        aws_commands.run(item.remove)
    left, failed = search(read_context("aws", DELETE))
    assert not failed
    assert [item.kind for item in left if not item.kept] == []
    (key,) = left
    assert key.kind == "KMS key"
    assert "AWS deletes it at 20" in key.kept


def test_all_pages_of_a_list_are_read(account: Callable[[str], Any]) -> None:
    logs = account("logs", region_name="us-east-2")
    for number in range(60):
        logs.create_log_group(logGroupName=f"/aws/containerinsights/{CLUSTER}/group{number}")
    context = read_context("aws", {"aws:region": "us-east-2"})
    (query,) = (item for item in orphans.searches(context) if item.kind == "log group")
    assert len(list(query.run())) == 60, "a page of log groups has 50 entries at most"


def test_the_control_planes_interfaces_are_found_by_their_description(account: Callable[[str], Any]) -> None:
    ec2 = account("ec2", region_name="us-east-2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    names = [CLUSTER, f"{CLUSTER}-0a1b2c3", f"{CLUSTER}-training"]
    cards = [ec2.create_network_interface(SubnetId=subnet, Description=f"Amazon EKS {name}") for name in names]
    context = read_context("aws", {"aws:region": "us-east-2"})
    (query,) = (item for item in orphans.searches(context) if item.kind == "network interface")
    expected = [card["NetworkInterface"]["NetworkInterfaceId"] for card in cards[:2]]
    assert sorted(item.id for item in query.run()) == sorted(expected), "the third is another stack's"


def test_a_subnet_that_the_cluster_only_uses_is_not_listed(account: Callable[[str], Any]) -> None:
    ec2 = account("ec2", region_name="us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    ids = []
    for position, value in enumerate(("shared", "owned")):
        tags = spec("subnet", {f"kubernetes.io/cluster/{CLUSTER}": value})
        made = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{position}.0/24", TagSpecifications=tags)
        ids.append(made["Subnet"]["SubnetId"])
    context = read_context("aws", {"aws:region": "us-east-1"})
    (query,) = (item for item in orphans.searches(context) if item.kind == "subnet")
    assert [item.id for item in query.run()] == ids[1:]


def test_a_missing_permission_names_the_action(
    account: Callable[[str], Any], recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    del account
    text = "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: logs:DescribeLogGroups"
    recorded.put("/", {"__type": "AccessDeniedException", "Message": text}, 400)
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", recorded.url)
    queries = [item for item in orphans.searches(read_context("aws")) if item.kind in ("log group", "cluster")]
    _, findings = run(queries, doctor.checks(read_context("aws"))[0], "test")
    (failed,) = (item for item in findings if item.status != "ok")
    assert (failed.check, failed.status, failed.cause) == ("log group", "unknown", "aws-denied")
    assert "logs:DescribeLogGroups" in failed.result


#: The kind that finds each type of the stack, or why none needs to: it is deleted with another, or is only a setting.
FOUND_BY = {
    "autoscaling/tag:Tag": "part of the Auto Scaling group",
    "cloudwatch/logGroup:LogGroup": "log group",
    "ec2/eip:Eip": "public address", "ec2/internetGateway:InternetGateway": "internet gateway",
    "ec2/launchTemplate:LaunchTemplate": "launch template", "ec2/natGateway:NatGateway": "NAT gateway",
    "ec2/placementGroup:PlacementGroup": "placement group", "ec2/route:Route": "part of the route table",
    "ec2/routeTable:RouteTable": "route table", "ec2/routeTableAssociation:RouteTableAssociation": "part of the subnet",
    "ec2/securityGroup:SecurityGroup": "security group", "ec2/subnet:Subnet": "subnet", "ec2/vpc:Vpc": "VPC",
    "ec2/vpcEndpoint:VpcEndpoint": "VPC endpoint", "ecr/lifecyclePolicy:LifecyclePolicy": "part of the repository",
    "ecr/repository:Repository": "image repository", "eks/addon:Addon": "part of the cluster",
    "eks/nodeGroup:NodeGroup": "node group", "eks/podIdentityAssociation:PodIdentityAssociation": "part of the cluster",
    "fsx/dataRepositoryAssociation:DataRepositoryAssociation": "part of the file system",
    "fsx/lustreFileSystem:LustreFileSystem": "file system", "iam/role:Role": "IAM role",
    "iam/rolePolicy:RolePolicy": "part of the role",
    "iam/rolePolicyAttachment:RolePolicyAttachment": "part of the role",
    "kms/alias:Alias": "part of the key", "kms/key:Key": "KMS key", "s3/bucket:Bucket": "bucket",
}  # fmt: skip


def test_every_type_of_the_stack_is_found_or_goes_with_another() -> None:
    golden = (Path(__file__).resolve().parents[1] / "infra/golden/aws.txt").read_text()
    types = {kind for kind in re.findall(r"^aws:(\S+)", golden, re.MULTILINE) if not kind.startswith("s3/bucket")}
    missing = types - set(FOUND_BY)
    assert not missing, "add a search for it, or say what it goes with"
    kinds = {query.kind for query in orphans.searches(read_context("aws"))}
    searched = {kind for kind in FOUND_BY.values() if not kind.startswith("part of")}
    assert searched <= kinds
