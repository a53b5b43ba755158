"""What AWS leaves behind a `destroy` of the real engine: moto holds it, and `python -m infra` finds it there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aws_commands
import boto3
import pytest
from engine_lifecycle import open_project
from engine_runs import Project
from engine_world import World
from moto.server import ThreadedMotoServer

_REGION = "us-west-2"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Start an empty account, in this process's environment, and return its address."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_DEFAULT_REGION": _REGION,
        }.items():
            patch.setenv(key, value)
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path, moto: str) -> tuple[World, Project]:
    """Return a stack that is up, whose cluster has made a volume, an interface and a log group in the account."""
    world, _, project = open_project(tmp_path_factory.mktemp("orphans"), "aws", kubeconfig)
    project.environment["AWS_ENDPOINT_URL"] = moto
    run = project.run("up", "live_stack")
    assert run.ok, run.output
    _make_in_account(world)
    return world, project


def _make_in_account(world: World) -> None:
    """Make in moto what the parts of the cluster make: with the tags that the stack's add-ons really set."""
    (cluster,) = (one.inputs["name"] for one in world.of_type("aws:eks/cluster:Cluster"))
    ec2, s3 = boto3.client("ec2"), boto3.client("s3")
    (driver,) = (one for one in world.of_type("aws:eks/addon:Addon") if one.inputs["addonName"] == "aws-ebs-csi-driver")
    tags = json.loads(driver.inputs["configurationValues"])["controller"]["extraVolumeTags"]
    ec2.create_volume(
        AvailabilityZone=f"{_REGION}a", Size=50, VolumeType="gp3", TagSpecifications=_tags("volume", tags)
    )
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    # https://github.com/aws/amazon-vpc-cni-k8s/pull/1482
    of_cni = {"cluster.k8s.amazonaws.com/name": cluster, "node.k8s.amazonaws.com/instance_id": "i-0"}
    ec2.create_network_interface(SubnetId=subnet, TagSpecifications=_tags("network-interface", of_cni))
    # EKS creates the group again after its deletion: https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2486
    boto3.client("logs").create_log_group(logGroupName=f"/aws/eks/{cluster}/cluster")
    for bucket in world.of_type("aws:s3/bucket:Bucket"):
        name = str(bucket.computed.get("bucket") or bucket.computed["name"])
        s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": _REGION})
        pairs = [{"Key": key, "Value": value} for key, value in bucket.inputs["tags"].items()]
        s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": pairs})


def _tags(kind: str, tags: dict[str, str]) -> list[dict[str, Any]]:
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": pairs}]


def infra(project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m infra` in the project's folder."""
    return subprocess.run(
        [sys.executable, "-m", "infra", *words, "--stack", "aws", "--cwd", str(project.work)],
        cwd=project.work,
        env=project.environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_a_running_cluster_uses_is_no_orphan(opened: tuple[World, Project]) -> None:
    done = infra(opened[1], "orphans")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stack aws: nothing is left" in done.stdout


def test_destroy_ends_with_what_is_left(opened: tuple[World, Project]) -> None:
    done = infra(opened[1], "destroy", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert any("aws ec2 delete-network-interface --network-interface-id eni-" in line for line in lines), done.stderr
    assert any("aws ec2 delete-volume --volume-id vol-" in line for line in lines)
    assert any("aws logs delete-log-group --log-group-name /aws/eks/torchrec-cloud-aws" in line for line in lines)
    assert any("storage.on_destroy is keep" in line for line in lines)
    assert lines[-1].startswith("stack aws: 3 orphans, at least 0.01 USD/h: run the commands from top to bottom")


def test_nothing_is_left_after_the_printed_commands(opened: tuple[World, Project]) -> None:
    listed = infra(opened[1], "orphans", "--json")
    assert listed.returncode == 1, listed.stderr
    for item in json.loads(listed.stdout)["orphans"]:
        aws_commands.run(item["remove"])
    done = infra(opened[1], "orphans")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stack aws: nothing is left" in done.stdout
