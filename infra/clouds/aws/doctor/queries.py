"""What the doctor asks AWS about one stack; each method returns one row of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from infra import catalog
from infra.clouds.aws.credentials import LOGIN
from infra.clouds.aws.doctor import networks
from infra.clouds.aws.doctor.causes import (
    ACCOUNT,
    BUCKET,
    EKS_ZONE,
    NETWORK_QUOTA,
    OFFER,
    OVERLAP,
    QUOTA,
    RESERVATION,
    ZONE,
)
from infra.clouds.aws.doctor.clients import Clients
from infra.clouds.aws.doctor.quotas import count_used_vcpus, find_quota, find_vcpus
from infra.clouds.aws.settings import UNSUPPORTED_ZONES, Settings
from infra.findings.model import Context, Finding, ok, problem, skipped

#: vCPU quotas by class of instance types: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
_ON_DEMAND = {"p": "L-417A185B", "g": "L-DB2E81BA"}
_SPOT = {"p4": "L-7212CCBC", "p5": "L-C4BD4855", "g5": "L-3819A6DF"}
_STANDARD, _STANDARD_CLASSES = "L-1216C47A", "acdhimrtz"
#: Service and code of the network quotas; a stack uses one of each.
_NETWORK = {"VPCs": ("vpc", "L-F678F1CE"), "Elastic IPs": ("ec2", "L-0263D0A3")}
_MISSING = ("404", "NoSuchBucket", "NotFound")
_FORBIDDEN = "403"


@dataclass(frozen=True)
class Queries:
    """The queries about one stack."""

    clients: Clients
    settings: Settings
    context: Context

    def credentials(self) -> Finding:
        """Check that the credentials work and belong to the stack's account."""
        me = self.clients("sts").get_caller_identity()
        stack_account = (self.context.outputs or {}).get("account")
        if stack_account and stack_account != me["Account"]:
            result = f"account {me['Account']} as {me['Arn']}; the stack is in {stack_account}"
            return problem(ACCOUNT, result, account=stack_account, login=LOGIN)
        return ok(f"account {me['Account']} as {me['Arn']}")

    def zones(self) -> Finding:
        """Check that the VPC's zones exist in this account, and that EKS accepts them."""
        answer = self.clients("ec2").describe_availability_zones(AllAvailabilityZones=False)
        existing = sorted(zone["ZoneName"] for zone in answer["AvailabilityZones"] if zone["State"] == "available")
        missing = [zone for zone in self.settings.zones if zone not in existing]
        if missing:
            names, region = ", ".join(existing) or "no zone", self.settings.region
            result = f"{', '.join(missing)} not in this account; {region} has {names}"
            return problem(ZONE, result, zone=existing[0] if existing else "<zone>")
        unsupported = UNSUPPORTED_ZONES.get(self.settings.region)
        refused = [zone["ZoneName"] for zone in answer["AvailabilityZones"] if zone["ZoneId"] == unsupported]
        others = [zone for zone in existing if zone not in refused]
        for zone in self.settings.zones:
            if zone in refused:
                return problem(EKS_ZONE, f"{zone} is {unsupported}; {', '.join(others)} are supported", zone=others[0])
        return ok(f"{', '.join(self.settings.zones)} of {len(existing)} zones")

    def offer(self) -> Finding:
        """Check that the GPU nodes' zone offers their instance type."""
        kind, zone = self.settings.gpu.instance_type, self.settings.gpu_zone
        filters = [{"Name": "instance-type", "Values": [kind]}]
        pages = self.clients("ec2").get_paginator("describe_instance_type_offerings")
        found = pages.paginate(LocationType="availability-zone", Filters=filters)
        zones = sorted(item["Location"] for page in found for item in page["InstanceTypeOfferings"])
        if zone in zones:
            return ok(f"{kind} is offered in {', '.join(zones)}")
        if not zones:
            fix = "another region: pulumi config set aws:region <region>; or another type: python -m infra instances"
            return problem(OFFER, f"{self.settings.region} does not offer {kind}", fix=fix)
        fix = f"pulumi config set --path gpu.zone {zones[0]}"
        return problem(OFFER, f"{zone} does not offer {kind}; {', '.join(zones)} do", fix=fix)

    def gpu_quota(self) -> Finding:
        """Check the vCPU quota of the GPU pool's capacity type against its maximum and the vCPUs in use."""
        kind, nodes = self.settings.gpu.instance_type, self.settings.gpu.nodes
        if self.settings.gpu.capacity == "capacity_block":
            return skipped("a capacity block does not count against the quota")
        spot = self.settings.interruptible
        code = _SPOT.get(kind[:2]) if spot else _ON_DEMAND.get(kind[:1])
        if code is None:
            return skipped(f"no quota is known for {kind}")
        vcpus = catalog.instance(self.settings.cloud, kind).num_vcpus
        classes = kind[:2] if spot and kind.startswith("p") else kind[:1]
        return self._compare_with_quota(code, classes, kind, nodes.max, vcpus, spot=spot)

    def system_quota(self) -> Finding:
        """Check the vCPU quota of the system nodes."""
        kind = self.settings.system.instance_type
        vcpus = find_vcpus(self.clients, [kind])[kind]
        return self._compare_with_quota(
            _STANDARD, _STANDARD_CLASSES, kind, self.settings.system.num_nodes, vcpus, spot=False
        )

    def _compare_with_quota(
        self, code: str, classes: str, kind: str, num_nodes: int, vcpus_per_node: int, *, spot: bool
    ) -> Finding:
        """Compare the vCPUs that nodes need, and those that other instances use, with a quota."""
        own_cluster = (self.context.outputs or {}).get("cluster_name")
        used = count_used_vcpus(self.clients, classes, spot=spot, own_cluster=own_cluster)
        quota = find_quota(self.clients, "ec2", code)
        needed, free = num_nodes * vcpus_per_node, int(quota["Value"]) - used
        what = f"{quota['QuotaName']}: {quota['Value']:g} vCPUs"
        result = f"{what}, {used} in use by others, {needed} needed for {num_nodes} x {kind}"
        if needed <= free:
            return ok(result)
        region, num_nodes_max = self.settings.region, max(0, free // vcpus_per_node)
        return problem(QUOTA, result, code=code, value=used + needed, region=region, nodes=num_nodes_max)

    def network_quota(self) -> Finding | list[Finding]:
        """Check that the account may create one more VPC and one more public address."""
        if self.settings.network.existing:
            return skipped("the stack creates no network")
        if self.context.outputs:
            return skipped("the stack has its network")
        ec2 = self.clients("ec2")
        used = {"VPCs": len(_vpcs(ec2)), "Elastic IPs": len(ec2.describe_addresses()["Addresses"])}
        problems, results = [], []
        for what, (service, code) in _NETWORK.items():
            limit = int(find_quota(self.clients, service, code)["Value"])
            results.append(f"{used[what]} of {limit} {what}")
            if used[what] >= limit:
                values = {"service": service, "code": code, "value": limit + 5, "region": self.settings.region}
                problems.append(problem(NETWORK_QUOTA, f"{results[-1]} in use", **values))
        return problems or ok(f"{', '.join(results)} in use")

    def reservation(self) -> Finding | list[Finding]:
        """Check that the reservation is active, has room, and matches the type and zone of the GPU nodes."""
        name, gpu = self.settings.gpu.reservation_id, self.settings.gpu
        if not name:
            return skipped(f"gpu.capacity is {gpu.capacity}")
        from botocore.exceptions import ClientError

        try:
            answer = self.clients("ec2").describe_capacity_reservations(CapacityReservationIds=[name])
        except ClientError as error:
            if "InvalidCapacityReservationId" not in str(error):
                raise
            fix = "pulumi config set --path gpu.reservation_id <id>; aws ec2 describe-capacity-reservations"
            return problem(RESERVATION, f"no reservation {name} in {self.settings.region}", fix=fix)
        found = answer["CapacityReservations"][0]
        free, total = int(found.get("AvailableInstanceCount", 0)), int(found["TotalInstanceCount"])
        kind, zone = found["InstanceType"], found["AvailabilityZone"]
        result = f"{name}: {found['State']}, {free} of {total} {kind} free in {zone}"
        fixes = []
        if found["State"] not in ("active", "scheduled"):
            fixes.append("create another: aws ec2 create-capacity-reservation, then set gpu.reservation_id")
        if kind != gpu.instance_type:
            fixes.append(f"pulumi config set --path gpu.instance_type {kind}")
        if zone != self.settings.gpu_zone:
            fixes.append(f"pulumi config set --path gpu.zone {zone}")
        if not self.context.outputs and free < gpu.nodes.desired:
            fixes.append(f"pulumi config set --path gpu.nodes.desired {free}")
        return problem(RESERVATION, result, fix="; ".join(fixes)) if fixes else ok(result)

    def existing_network(self) -> Finding | list[Finding]:
        """Check the network that the stack uses and does not create."""
        return networks.existing_network(self.clients, self.settings, is_up=bool(self.context.outputs))

    def overlaps(self) -> Finding:
        """Report other VPCs of the region whose addresses overlap the stack's: they could not be connected."""
        if self.settings.network.existing:
            return skipped("the stack creates no network")
        if self.context.outputs:
            return skipped("the stack has its network")
        own = IPv4Network(self.settings.network.cidr)
        others = [(str(vpc["VpcId"]), IPv4Network(vpc["CidrBlock"])) for vpc in _vpcs(self.clients("ec2"))]
        overlapping = [f"{name} ({cidr})" for name, cidr in others if cidr.overlaps(own)]
        if not overlapping:
            return ok(f"{own} overlaps none of {len(others)} VPCs")
        blocks = (block for block in IPv4Network("10.0.0.0/8").subnets(new_prefix=own.prefixlen))
        free = next((block for block in blocks if not any(block.overlaps(cidr) for _, cidr in others)), "<range>")
        found = problem(OVERLAP, f"{own} overlaps {', '.join(overlapping)}", free=free)
        # Networks that are never connected may use the same addresses, so this is not a problem.
        return Finding("ok", f"{found.result}; harmless unless they are connected", found.fix, found.cause)

    def bucket(self) -> Finding:
        """Check that the checkpoint bucket exists; before `up` its name, which has a random suffix, is not known."""
        if not self.context.outputs:
            return skipped("`up` chooses an unused name")
        from botocore.exceptions import ClientError

        name = str(self.context.outputs["bucket_uri"]).removeprefix("s3://")
        try:
            self.clients("s3").head_bucket(Bucket=name)
        except ClientError as error:
            code = str(error.response["Error"]["Code"])
            if code not in (*_MISSING, _FORBIDDEN):
                raise
            state = "does not exist" if code in _MISSING else f"rejects these credentials ({_FORBIDDEN})"
            return problem(BUCKET, f"s3://{name} {state}", bucket=name, stack=self.context.stack)
        return ok(f"s3://{name} exists")


def _vpcs(ec2: Any) -> list[Mapping[str, Any]]:
    return [vpc for page in ec2.get_paginator("describe_vpcs").paginate() for vpc in page["Vpcs"]]
