"""Tests of `network.api_access: bastion`: the machine, its rights, and the kubeconfig through it."""

from __future__ import annotations

import json

import pytest
from aws_stack import EKS, GROUP, settings_of
from provider_mocks.recording import Recording, run_stack

from infra import tunnel

BASTION = {"network.api_access": "bastion"}
MACHINE = "aws:ec2/instance:Instance"


@pytest.fixture(scope="module")
def opened() -> list[tunnel.Tunnel]:
    """Return the tunnels that the program opened."""
    return []


@pytest.fixture(scope="module")
def made(opened: list[tunnel.Tunnel]) -> Recording:
    """Record the stack with a bastion, whose tunnel is only recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tunnel, "hold_until_exit", opened.append)
        recording = run_stack("aws", BASTION)
    if recording.error:
        raise recording.error
    return recording


def test_the_api_stays_private_and_the_machine_has_no_inbound_port(made: Recording) -> None:
    assert made.one(EKS).inputs["endpointPublicAccess"] is False
    machine, group = made.one(MACHINE).inputs, made.one(GROUP, "aws-cluster-bastion-group").inputs
    assert not group.get("ingress")
    assert [(rule["fromPort"], rule["toPort"]) for rule in group["egress"]] == [(443, 443)]
    assert machine["associatePublicIpAddress"] is False
    assert machine["metadataOptions"]["httpTokens"] == "required"
    assert machine["rootBlockDevice"]["encrypted"] is True
    assert "keyName" not in machine


def test_only_session_manager_may_control_the_machine(made: Recording) -> None:
    attached = made.of_type("aws:iam/rolePolicyAttachment:RolePolicyAttachment")
    arns = [item.inputs["policyArn"] for item in attached if item.parent_name == "aws-cluster-bastion-ssm"]
    assert arns == ["arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"]
    assert made.one("aws:iam/instanceProfile:InstanceProfile").inputs["role"] == "aws-cluster-bastion-ssm-role"


def test_the_api_server_lets_the_machine_in(made: Recording) -> None:
    rule = made.one("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule").inputs
    assert rule["securityGroupId"] == "sg-aws-cluster-eks"
    assert (rule["referencedSecurityGroupId"], rule["fromPort"]) == ("aws-cluster-bastion-group-id", 443)


def test_the_way_in_stays_until_the_last_object_is_deleted(made: Recording) -> None:
    provider = made.one("pulumi:providers:kubernetes")
    assert made.needs(provider, made.one(MACHINE))
    rule = made.one("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
    assert made.needs(provider, rule), "without the rule the API server refuses the deletion of objects"


def test_a_newer_image_does_not_replace_the_machine(made: Recording) -> None:
    assert made.one(MACHINE).ignored == ("ami",)


def test_the_machine_starts_after_its_way_to_session_manager(made: Recording) -> None:
    nat = made.one("aws:ec2/route:Route", "aws-network-way-out")
    assert made.needs(made.one(MACHINE), nat), "without it the agent never registers"


def test_the_program_forwards_a_port_to_the_endpoint(made: Recording, opened: list[tunnel.Tunnel]) -> None:
    [found] = opened
    assert found.server_name == "aws-cluster-eks.gr7.us-west-2.eks.amazonaws.com"
    words = list(found.command)
    assert words[:3] == ["aws", "ssm", "start-session"]
    assert words[words.index("--target") + 1] == "aws-cluster-bastion-machine-id"
    assert words[words.index("--document-name") + 1] == "AWS-StartPortForwardingSessionToRemoteHost"
    parameters = json.loads(words[words.index("--parameters") + 1])
    assert parameters == {"host": [found.server_name], "portNumber": ["443"], "localPortNumber": [str(found.port)]}


def test_objects_are_created_through_the_tunnel_and_with_the_certificates_name(
    made: Recording, opened: list[tunnel.Tunnel]
) -> None:
    cluster = json.loads(made.exports["kubeconfig"])["clusters"][0]["cluster"]
    assert cluster["server"] == f"https://127.0.0.1:{opened[0].port}"
    assert cluster["tls-server-name"] == opened[0].server_name
    assert "kubeconfig" in made.secret_exports


def test_another_way_to_the_cluster_replaces_no_object_in_it(made: Recording) -> None:
    direct = run_stack("aws").one("pulumi:providers:kubernetes").inputs
    through = made.one("pulumi:providers:kubernetes").inputs
    assert through["kubeconfig"] != direct["kubeconfig"]
    assert through["clusterIdentifier"] == direct["clusterIdentifier"], "the provider compares it instead"


def test_the_cost_includes_the_machine() -> None:
    lines = [line for line in settings_of(BASTION).cost_lines(1) if line.what.startswith("bastion")]
    assert lines[0].on_demand_usd_per_hour == pytest.approx(0.0061, abs=1e-4)
