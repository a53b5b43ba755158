"""The doctor's checks of an AWS account, against moto's server and recorded quotas, which moto lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import boto3
import pytest
from doctor_answers import Recorded, one, run_checks

from infra.clouds.aws import doctor
from infra.clouds.aws.doctor.queries import Queries
from infra.findings.model import Context

Contexts = Callable[..., Context]
P_ON_DEMAND, P4_SPOT, P5_SPOT, STANDARD = "L-417A185B", "L-7212CCBC", "L-C4BD4855", "L-1216C47A"
VPCS, ADDRESSES = "L-F678F1CE", "L-0263D0A3"


@pytest.fixture
def quotas(recorded: Recorded) -> dict[str, float]:
    """Return the applied quotas by code; a missing code has only the default of AWS, 0."""
    values = {P_ON_DEMAND: 1152.0, P4_SPOT: 96.0, P5_SPOT: 0.0, STANDARD: 256.0, VPCS: 20.0, ADDRESSES: 20.0}

    def answer(_: Mapping[str, str], body: bytes) -> tuple[int, object]:
        code = json.loads(body)["QuotaCode"]
        default = "default" in str(recorded.requests[-1][2].get("X-Amz-Target", "")).lower()
        if code not in values and not default:
            return 400, {"__type": "NoSuchResourceException", "Message": "no such quota"}
        quota = {"QuotaCode": code, "QuotaName": f"Quota {code}", "Value": values.get(code, 0.0), "Adjustable": True}
        return 200, {"Quota": quota}

    recorded.answers["/"] = answer
    return values


@pytest.fixture
def account(server: str, recorded: Recorded, quotas: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set up an empty account in the environment and return the EC2 client of us-west-2."""
    for key, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": server,
        "AWS_ENDPOINT_URL_SERVICE_QUOTAS": recorded.url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(key, value)
    boto3.client("sts", region_name="us-west-2").get_caller_identity()
    import urllib3

    urllib3.request("POST", f"{server}/moto-api/reset", timeout=60)
    return boto3.client("ec2", region_name="us-west-2")


@pytest.mark.usefixtures("account")
def test_an_account_with_everything_it_needs_has_no_problem(context: Contexts) -> None:
    found = run_checks(doctor.checks(context("aws")))
    assert not [item for items in found.values() for item in items if item.status in ("problem", "unknown")]
    assert "account 123456789012 as arn:aws:sts" in one(found, "credentials").result
    assert "p4d.24xlarge is offered in us-west-2a" in one(found, "instance type").result
    assert "1152 vCPUs, 0 in use by others, 192 needed for 2 x p4d.24xlarge" in one(found, "quota").result


@pytest.mark.usefixtures("account")
def test_a_small_quota_is_reported_with_the_command_that_increases_it(
    context: Contexts, quotas: dict[str, float]
) -> None:
    quotas[P_ON_DEMAND] = 96.0
    finding = one(run_checks(doctor.checks(context("aws")), "quota"), "quota")
    assert finding.status == "problem"
    assert "96 vCPUs, 0 in use by others, 192 needed for 2 x p4d.24xlarge" in finding.result
    assert f"--quota-code {P_ON_DEMAND} --desired-value 192 --region us-west-2" in finding.fix
    assert "gpu.nodes.max 1" in finding.fix, "one node fits into 96 vCPUs"


@pytest.mark.usefixtures("account")
def test_an_account_without_a_quota_increase_has_the_default_quota(context: Contexts, quotas: dict[str, float]) -> None:
    del quotas[P_ON_DEMAND]
    finding = one(run_checks(doctor.checks(context("aws")), "quota"), "quota")
    assert (finding.status, finding.cause) == ("problem", "aws-quota")
    assert ": 0 vCPUs" in finding.result


@pytest.mark.parametrize(("kind", "code"), [("p4d.24xlarge", P4_SPOT), ("p5.48xlarge", P5_SPOT)])
@pytest.mark.usefixtures("account")
def test_spot_nodes_count_against_the_spot_quota(context: Contexts, kind: str, code: str) -> None:
    settings = context("aws", {"gpu.capacity": "spot", "gpu.instance_type": kind})
    finding = one(run_checks(doctor.checks(settings), "quota"), "quota")
    assert finding.status == "problem", "96 and 0 vCPUs are too few for two nodes"
    assert f"Quota {code}" in finding.result


def test_only_instances_of_other_stacks_reduce_the_quota(
    account: Any, context: Contexts, quotas: dict[str, float]
) -> None:
    quotas[P_ON_DEMAND] = 200.0
    image = account.describe_images()["Images"][0]["ImageId"]
    tag = {"ResourceType": "instance", "Tags": [{"Key": "eks:cluster-name", "Value": "mine"}]}
    account.run_instances(ImageId=image, MinCount=1, MaxCount=1, InstanceType="p4d.24xlarge", TagSpecifications=[tag])
    outputs = {"account": "123456789012", "cluster_name": "mine", "bucket_uri": "s3://b"}
    assert one(run_checks(doctor.checks(context("aws", None, outputs)), "quota"), "quota").status == "ok"
    finding = one(
        run_checks(doctor.checks(context("aws", None, {**outputs, "cluster_name": "other"})), "quota"), "quota"
    )
    assert finding.status == "problem"
    assert "96 in use by others, 192 needed" in finding.result


@pytest.mark.usefixtures("account")
def test_a_zone_without_the_instance_type_is_reported_with_a_zone_that_offers_it(context: Contexts) -> None:
    settings = context(
        "aws", {"gpu.instance_type": "g5.xlarge", "gpu.zone": "us-west-2d", "network.cidr": "10.0.0.0/16"}
    )
    finding = one(run_checks(doctor.checks(settings), "instance type"), "instance type")
    assert finding.status == "problem"
    assert finding.result == "us-west-2d does not offer g5.xlarge; us-west-2a, us-west-2b, us-west-2c do"
    assert finding.fix == "pulumi config set --path gpu.zone us-west-2a"


@pytest.mark.usefixtures("account")
def test_a_region_without_the_instance_type_is_a_problem(context: Contexts) -> None:
    settings = context("aws", {"aws:region": "eu-north-1", "gpu.instance_type": "p4de.24xlarge"})
    finding = one(run_checks(doctor.checks(settings), "instance type"), "instance type")
    assert finding.status == "problem"
    assert finding.result == "eu-north-1 does not offer p4de.24xlarge"


@pytest.mark.usefixtures("account")
def test_zones_unavailable_to_the_account_are_reported(context: Contexts) -> None:
    finding = one(run_checks(doctor.checks(context("aws", {"aws:region": "us-west-1"})), "zones"), "zones")
    assert finding.status == "ok", "moto's us-west-1 has zones a and b"
    settings = context("aws", {"aws:region": "us-west-1", "network.zones": ["us-west-1a", "us-west-1f"]})
    finding = one(run_checks(doctor.checks(settings), "zones"), "zones")
    assert finding.status == "problem"
    assert finding.result.startswith("us-west-1f not in this account; us-west-1 has us-west-1a")


@pytest.mark.usefixtures("account")
def test_a_zone_that_eks_does_not_support_is_reported_with_one_that_it_does(context: Contexts) -> None:
    settings = context("aws", {"aws:region": "us-east-1", "network.zones": ["us-east-1a", "us-east-1e"]})
    finding = one(run_checks(doctor.checks(settings), "zones"), "zones")
    assert finding.status == "problem"
    assert finding.result.startswith("us-east-1e is use1-az3; us-east-1a")


RESERVED = {"gpu.capacity": "reservation", "gpu.reservation_id": "cr-0123456789abcdef0"}


@pytest.mark.parametrize(
    ("held", "fix"),
    [
        ({}, ""),
        ({"State": "expired"}, "create another"),
        ({"InstanceType": "p5.48xlarge"}, "gpu.instance_type p5.48xlarge"),
        ({"AvailabilityZone": "us-west-2c"}, "gpu.zone us-west-2c"),
        ({"AvailableInstanceCount": 1}, "gpu.nodes.desired 1"),
    ],
    ids=["matching", "expired", "another type", "another zone", "full"],
)
def test_a_reservation_must_be_active_and_match_type_zone_and_number_of_nodes(
    account: Any, context: Contexts, monkeypatch: pytest.MonkeyPatch, held: dict[str, object], fix: str
) -> None:
    answer = {
        "CapacityReservationId": RESERVED["gpu.reservation_id"], "State": "active", "InstanceType": "p4d.24xlarge",
        "AvailabilityZone": "us-west-2a", "AvailableInstanceCount": 2, "TotalInstanceCount": 2,
    } | held  # fmt: skip

    class Ec2:
        def describe_capacity_reservations(self, CapacityReservationIds: list[str]) -> object:
            assert CapacityReservationIds == [RESERVED["gpu.reservation_id"]]
            return {"CapacityReservations": [answer]}

    settings = context("aws", RESERVED)
    queries = Queries(lambda _: Ec2(), settings.settings, settings)  # type: ignore[arg-type]
    finding = queries.reservation()
    assert not isinstance(finding, list)
    assert finding.status == ("problem" if fix else "ok")
    assert fix in finding.fix


@pytest.mark.usefixtures("account")
def test_a_range_that_overlaps_another_vpc_is_reported_with_a_free_one(context: Contexts) -> None:
    boto3.client("ec2", region_name="us-west-2").create_vpc(CidrBlock="10.0.0.0/16")
    finding = one(run_checks(doctor.checks(context("aws")), "addresses"), "addresses")
    assert finding.status == "ok", "networks that are not connected may overlap"
    assert "10.0.0.0/16 overlaps vpc-" in finding.result
    assert finding.fix.endswith("network.cidr 10.1.0.0/16")


@pytest.mark.usefixtures("account")
def test_a_region_at_its_vpc_quota_is_a_problem(context: Contexts, quotas: dict[str, float]) -> None:
    quotas[VPCS] = 1.0
    finding = one(run_checks(doctor.checks(context("aws")), "quota of the network"), "quota of the network")
    assert finding.status == "problem", "moto's default VPC is one"
    assert finding.result == "1 of 1 VPCs in use"
    assert f"--service-code vpc --quota-code {VPCS} --desired-value 6" in finding.fix


@pytest.mark.usefixtures("account")
def test_the_bucket_of_a_stack_that_is_up_must_exist(context: Contexts) -> None:
    outputs = {"account": "123456789012", "cluster_name": "c", "bucket_uri": "s3://checkpoints-1234"}
    checks = doctor.checks(context("aws", None, outputs))
    assert one(run_checks(checks, "bucket"), "bucket").status == "problem"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="checkpoints-1234")
    assert one(run_checks(checks, "bucket"), "bucket").status == "ok"


@pytest.mark.usefixtures("account")
def test_credentials_of_another_account_are_a_problem(context: Contexts) -> None:
    outputs = {"account": "999999999999", "cluster_name": "c", "bucket_uri": "s3://b"}
    finding = one(run_checks(doctor.checks(context("aws", None, outputs)), "credentials"), "credentials")
    assert finding.status == "problem"
    assert "the stack is in 999999999999" in finding.result


@pytest.mark.usefixtures("account")
def test_missing_credentials_are_fixed_by_a_login(context: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    finding = one(run_checks(doctor.checks(context("aws")), "credentials"), "credentials")
    assert (finding.status, finding.cause) == ("problem", "aws-credentials")
    assert finding.fix.startswith("aws sso login")


@pytest.mark.usefixtures("account")
def test_a_denied_request_is_unknown_and_not_a_problem(context: Contexts, recorded: Recorded) -> None:
    denied = {"__type": "AccessDeniedException", "Message": "User: me is not authorized to perform: GetServiceQuota"}
    recorded.answers["/"] = (400, denied)
    finding = one(run_checks(doctor.checks(context("aws")), "quota"), "quota")
    assert (finding.status, finding.cause) == ("unknown", "aws-denied")
    assert "GetServiceQuota" in finding.result


@pytest.mark.usefixtures("account")
def test_only_the_registry_of_the_account_gets_a_login(context: Contexts) -> None:
    found = doctor.login(context("aws"), "123456789012.dkr.ecr.us-west-2.amazonaws.com")
    assert found
    assert found[0] == "AWS"
    assert doctor.login(context("aws"), "ghcr.io") is None


def test_a_pool_with_efa_must_advertise_its_cards(context: Contexts) -> None:
    assert doctor.devices(context("aws").settings) == {"vpc.amazonaws.com/efa": 4}
    assert doctor.devices(context("aws", {"gpu.instance_type": "g5.xlarge"}).settings) == {}


@pytest.mark.usefixtures("account")
def test_a_failing_service_is_unknown_and_not_an_error_of_the_doctor(context: Contexts, recorded: Recorded) -> None:
    recorded.answers["/"] = (500, {"__type": "ServiceException", "Message": "Something went wrong"})
    finding = one(run_checks(doctor.checks(context("aws")), "quota"), "quota")
    assert (finding.status, finding.cause) == ("unknown", "slow")
