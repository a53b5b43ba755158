"""What AWS says before anything is made: who is asking, what the region offers, how much of it the account may use."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from typing import Any

from infra import catalog
from infra.clouds.aws import causes
from infra.clouds.aws.causes import (
    ACCOUNT,
    BUCKET,
    CREDENTIALS,
    DENIED,
    NETWORK_QUOTA,
    OFFER,
    OVERLAP,
    QUOTA,
    RESERVATION,
    UNREACHABLE,
    ZONE,
)
from infra.clouds.aws.credentials import LOGIN
from infra.clouds.aws.settings import Settings
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import Check, Context, Finding, QueryFailedError, ok, problem, skipped

PACKAGES = ("pulumi-aws", "pulumi-eks")


#: Quotas of vCPUs by class of instance types: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_ON_DEMAND = {"p": "L-417A185B", "g": "L-DB2E81BA"}
_SPOT = {"p4": "L-7212CCBC", "p5": "L-C4BD4855", "g5": "L-3819A6DF"}
_STANDARD = "L-1216C47A"
#: Quotas of the network by service; the second is how many one stack takes.
_NETWORK = {"VPCs": ("vpc", "L-F678F1CE"), "Elastic IPs": ("ec2", "L-0263D0A3")}
_DENIED = ("AccessDenied", "UnauthorizedOperation", "AccessDeniedException", "AuthFailure")
_REGISTRY = re.compile(r"^\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com$")
_MISSING = ("404", "NoSuchBucket", "NotFound")
WHO = "credentials"
CAUSES = causes.CAUSES

Clients = Callable[[str], Any]


def checks(context: Context) -> list[Check]:
    """Every question, the first being who asks."""
    settings = context.settings
    assert isinstance(settings, Settings)
    ask = Questions(_clients(settings.region), settings, context)
    asked: Mapping[str, Callable[[], Finding | list[Finding]]] = {
        "zones": ask.zones,
        "instance type": ask.offer,
        "quota": ask.gpu_quota,
        "quota of system nodes": ask.system_quota,
        "quota of the network": ask.network_quota,
        "reservation": ask.reservation,
        "addresses": ask.overlaps,
        "bucket": ask.bucket,
    }
    who = Check(WHO, partial(_asking, ask.credentials, settings))
    return [who, *(Check(name, partial(_asking, run, settings), WHO) for name, run in asked.items())]


def devices(settings: Settings) -> Mapping[str, int]:
    """The network cards that speak EFA."""
    count = settings.num_efa_interfaces
    return {"vpc.amazonaws.com/efa": count} if count else {}


def login(context: Context, host: str) -> tuple[str, str] | None:
    """ECR's password of twelve hours."""
    match = _REGISTRY.match(host)
    if not match:
        return None
    assert isinstance(context.settings, Settings)
    try:
        answer = _clients(match[1])("ecr").get_authorization_token()
    except Exception as error:
        raise _explained(error, context.settings) from None
    user, _, password = base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode().partition(":")
    return user, password


@dataclass(frozen=True)
class Questions:
    """What is asked about one stack."""

    clients: Clients
    settings: Settings
    context: Context

    def credentials(self) -> Finding:
        """Who asks, and whether the stack is in that account."""
        me = self.clients("sts").get_caller_identity()
        before = (self.context.outputs or {}).get("account")
        if before and before != me["Account"]:
            told = f"account {me['Account']} as {me['Arn']}; the stack is in {before}"
            return problem(ACCOUNT, told, account=before, login=LOGIN)
        return ok(f"account {me['Account']} as {me['Arn']}")

    def zones(self) -> Finding:
        """The zones of the VPC exist in this account."""
        answer = self.clients("ec2").describe_availability_zones(AllAvailabilityZones=False)
        there = sorted(zone["ZoneName"] for zone in answer["AvailabilityZones"] if zone["State"] == "available")
        missing = [zone for zone in self.settings.zones if zone not in there]
        if missing:
            told = (
                f"{', '.join(missing)} not in this account; {self.settings.region} has {', '.join(there) or 'no zone'}"
            )
            return problem(ZONE, told, zone=there[0] if there else "<zone>")
        return ok(f"{', '.join(self.settings.zones)} of {len(there)} zones")

    def offer(self) -> Finding:
        """The zone of the GPU nodes offers their type."""
        kind, zone = self.settings.gpu.instance_type, self.settings.gpu_zone
        pages = self.clients("ec2").get_paginator("describe_instance_type_offerings")
        wanted = [{"Name": "instance-type", "Values": [kind]}]
        found = pages.paginate(LocationType="availability-zone", Filters=wanted)
        there = sorted(item["Location"] for page in found for item in page["InstanceTypeOfferings"])
        if zone in there:
            return ok(f"{kind} is offered in {', '.join(there)}")
        if not there:
            other = "another region: pulumi config set aws:region <region>; or another type: python -m infra instances"
            return problem(OFFER, f"{self.settings.region} does not offer {kind}", fix=other)
        command = f"pulumi config set --path gpu.zone {there[0]}"
        return problem(OFFER, f"{zone} does not offer {kind}; {', '.join(there)} do", fix=command)

    def gpu_quota(self) -> Finding:
        """vCPUs for the pool at its maximum beside what already runs, by the way that the nodes are bought."""
        kind, nodes = self.settings.gpu.instance_type, self.settings.gpu.nodes
        if self.settings.gpu.capacity == "capacity_block":
            return skipped("a capacity block does not count against the quota")
        spot = self.settings.interruptible
        code = _SPOT.get(kind[:2]) if spot else _ON_DEMAND.get(kind[:1])
        if code is None:
            return skipped(f"no quota is known for {kind}")
        each = catalog.instance(self.settings.cloud, kind).num_vcpus
        letter = kind[:2] if spot and kind.startswith("p") else kind[:1]
        used = _used_vcpus(self.clients, letter, spot, (self.context.outputs or {}).get("cluster_name"))
        return _judged(self.clients, self.settings, code, nodes.max * each, used, each, f"{nodes.max} x {kind}")

    def system_quota(self) -> Finding:
        """vCPUs for the nodes of operators and dashboards."""
        kind = self.settings.system.instance_type
        each = _vcpus(self.clients, [kind])[kind]
        count, name = self.settings.system.num_nodes, (self.context.outputs or {}).get("cluster_name")
        used = _used_vcpus(self.clients, "acdhimrtz", False, name)
        return _judged(self.clients, self.settings, _STANDARD, count * each, used, each, f"{count} x {kind}")

    def network_quota(self) -> Finding | list[Finding]:
        """Room for one more VPC and one more public address."""
        if self.context.outputs:
            return skipped("the stack has its network")
        ec2 = self.clients("ec2")
        used = {"VPCs": len(_vpcs(ec2)), "Elastic IPs": len(ec2.describe_addresses()["Addresses"])}
        found, told = [], []
        for what, (service, code) in _NETWORK.items():
            limit = int(_quota(self.clients, service, code)["Value"])
            told.append(f"{used[what]} of {limit} {what}")
            if used[what] >= limit:
                values = {"service": service, "code": code, "value": limit + 5, "region": self.settings.region}
                found.append(problem(NETWORK_QUOTA, f"{told[-1]} in use", **values))
        return found or ok(f"{', '.join(told)} in use")

    def reservation(self) -> Finding | list[Finding]:
        """The reservation is active, of this type, in this zone, and has room."""
        name, gpu = self.settings.gpu.reservation_id, self.settings.gpu
        if not name:
            return skipped(f"gpu.capacity is {gpu.capacity}")
        from botocore.exceptions import ClientError

        try:
            answer = self.clients("ec2").describe_capacity_reservations(CapacityReservationIds=[name])
        except ClientError as error:
            if "InvalidCapacityReservationId" not in str(error):
                raise
            command = "pulumi config set --path gpu.reservation_id <id>; aws ec2 describe-capacity-reservations"
            return problem(RESERVATION, f"no reservation {name} in {self.settings.region}", fix=command)
        held = answer["CapacityReservations"][0]
        free, total = int(held.get("AvailableInstanceCount", 0)), int(held["TotalInstanceCount"])
        told = f"{name}: {held['State']}, {free} of {total} {held['InstanceType']} free in {held['AvailabilityZone']}"
        wrong = []
        if held["State"] not in ("active", "scheduled"):
            wrong.append("make another: aws ec2 create-capacity-reservation, then set gpu.reservation_id")
        if held["InstanceType"] != gpu.instance_type:
            wrong.append(f"pulumi config set --path gpu.instance_type {held['InstanceType']}")
        if held["AvailabilityZone"] != self.settings.gpu_zone:
            wrong.append(f"pulumi config set --path gpu.zone {held['AvailabilityZone']}")
        if not self.context.outputs and free < gpu.nodes.desired:
            wrong.append(f"pulumi config set --path gpu.nodes.desired {free}")
        return problem(RESERVATION, told, fix="; ".join(wrong)) if wrong else ok(told)

    def overlaps(self) -> Finding:
        """Other VPCs of the region that the stack's could not be connected with."""
        if self.context.outputs:
            return skipped("the stack has its network")
        mine = IPv4Network(self.settings.network.cidr)
        taken = [(str(vpc["VpcId"]), IPv4Network(vpc["CidrBlock"])) for vpc in _vpcs(self.clients("ec2"))]
        met = [f"{name} ({cidr})" for name, cidr in taken if cidr.overlaps(mine)]
        if not met:
            return ok(f"{mine} meets none of {len(taken)} VPCs")
        blocks = (block for block in IPv4Network("10.0.0.0/8").subnets(new_prefix=mine.prefixlen))
        free = next((block for block in blocks if not any(block.overlaps(cidr) for _, cidr in taken)), "<range>")
        found = problem(OVERLAP, f"{mine} overlaps {', '.join(met)}", free=free)
        # Separate networks may use the same addresses: nothing to fix unless they are to be joined.
        return Finding("ok", f"{found.result}; harmless unless they are connected", found.fix, found.cause)

    def bucket(self) -> Finding:
        """The bucket of checkpoints, once it is there. Pulumi draws the end of its name, so none can be taken."""
        if not self.context.outputs:
            return skipped("`up` draws the name, so that nobody can have it")
        from botocore.exceptions import ClientError

        name = str(self.context.outputs["bucket_uri"]).removeprefix("s3://")
        try:
            self.clients("s3").head_bucket(Bucket=name)
        except ClientError as error:
            code = str(error.response["Error"]["Code"])
            if code not in (*_MISSING, "403"):
                raise
            told = "is gone" if code in _MISSING else "refuses these credentials (403)"
            return problem(BUCKET, f"s3://{name} {told}", bucket=name, stack=self.context.stack)
        return ok(f"s3://{name} is there")


def _judged(clients: Clients, settings: Settings, code: str, needed: int, used: int, each: int, what: str) -> Finding:
    """Needed and used vCPUs beside the quota."""
    quota = _quota(clients, "ec2", code)
    told = f"{quota['QuotaName']}: {quota['Value']:g} vCPUs, {used} in use by others, {needed} needed for {what}"
    free = int(quota["Value"]) - used
    if needed <= free:
        return ok(told)
    values = {"code": code, "value": used + needed, "region": settings.region, "nodes": max(0, free // each)}
    return problem(QUOTA, told, **values)


def _used_vcpus(clients: Clients, letters: str, spot: bool, own: str | None) -> int:
    """vCPUs of running instances of a class, without those of this stack's own cluster."""
    pages = clients("ec2").get_paginator("describe_instances")
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    running: Counter[str] = Counter()
    for page in pages.paginate(Filters=states):
        for instance in (item for group in page["Reservations"] for item in group["Instances"]):
            kind = str(instance["InstanceType"])
            counted = kind.startswith(letters) if len(letters) <= 2 else kind[:1] in letters
            tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
            mine = own is not None and tags.get("eks:cluster-name") == own
            if counted and not mine and (instance.get("InstanceLifecycle") == "spot") == spot:
                running[kind] += 1
    each = _vcpus(clients, sorted(running)) if running else {}
    return sum(count * each[kind] for kind, count in running.items())


def _vcpus(clients: Clients, kinds: list[str]) -> dict[str, int]:
    """vCPUs by type: quotas count those that a type has by default, whatever an instance was started with."""
    pages = clients("ec2").get_paginator("describe_instance_types").paginate(InstanceTypes=kinds)
    return {
        str(item["InstanceType"]): int(item["VCpuInfo"]["DefaultVCpus"])
        for page in pages
        for item in page["InstanceTypes"]
    }


def _quota(clients: Clients, service: str, code: str) -> Mapping[str, Any]:
    """The account's value; AWS's own where the account never asked for another."""
    quotas = clients("service-quotas")
    try:
        found: Mapping[str, Any] = quotas.get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    except quotas.exceptions.NoSuchResourceException:
        found = quotas.get_aws_default_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]
    return found


def _vpcs(ec2: Any) -> list[Mapping[str, Any]]:
    return [vpc for page in ec2.get_paginator("describe_vpcs").paginate() for vpc in page["Vpcs"]]


def _clients(region: str) -> Clients:
    """Clients of one region, each made once; short time-outs, since a person waits."""
    made: dict[str, Any] = {}

    def client(service: str) -> Any:
        import boto3
        from botocore.config import Config

        if service not in made:
            config = Config(connect_timeout=5, read_timeout=15, retries={"mode": "standard", "total_max_attempts": 2})
            made[service] = boto3.session.Session(region_name=region).client(service, config=config)
        return made[service]

    return client


def _asking(run: Callable[[], Finding | list[Finding]], settings: Settings) -> Finding | list[Finding]:
    try:
        return run()
    except Exception as error:
        raise _explained(error, settings) from None


def _explained(error: Exception, settings: Settings) -> Exception:
    """What the client raises as a row with its cause; anything else as it is."""
    if isinstance(error, ModuleNotFoundError):
        return QueryFailedError(NO_CLIENT, f"the Python package {error.name} is missing")
    from botocore import exceptions

    told = " ".join(str(error).split())[:300]
    if isinstance(error, exceptions.ClientError):
        code = str(error.response["Error"]["Code"])
        if int(error.response["ResponseMetadata"]["HTTPStatusCode"]) >= 500:  # HTTP: the service's own fault
            return QueryFailedError(SLOW, told)
        if any(text in code for text in _DENIED) and code != "AuthFailure":
            return QueryFailedError(DENIED, told)
        return QueryFailedError(CREDENTIALS, told, is_problem=True, login=LOGIN) if _refused(code) else error
    if isinstance(error, (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError)):
        return QueryFailedError(UNREACHABLE, told, region=settings.region)
    if isinstance(error, (exceptions.BotoCoreError,)):
        return QueryFailedError(CREDENTIALS, told, is_problem=True, login=LOGIN)
    return error


def _refused(code: str) -> bool:
    return code in (
        "ExpiredToken",
        "RequestExpired",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "AuthFailure",
    )
