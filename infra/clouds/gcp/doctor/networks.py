"""Whether the VPC of `network.existing` has what the stack's nodes need; the stack never changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv4Network
from typing import Any

from infra.clouds.gcp.addresses import MTU_BYTES, ExistingNetwork
from infra.clouds.gcp.doctor.causes import EXISTING_NETWORK
from infra.clouds.gcp.doctor.client import ApiError, Rest
from infra.clouds.gcp.settings import NUM_RESERVED, NUM_SERVICES, POD_ADDRESSES_PER_NODE, Settings
from infra.findings.model import Finding, ok, problem, skipped

#: The peering of private services access, and the purpose of the ranges that a VPC reserves for it.
#: https://cloud.google.com/vpc/docs/configure-private-services-access
_SERVICES_PEERING, _SERVICES_PURPOSE = "servicenetworking-googleapis-com", "VPC_PEERING"
#: What Cloud NAT translates of a subnet: all of it, or only the primary range, from which nodes have their addresses.
_OF_ALL_SUBNETS = ("ALL_SUBNETWORKS_ALL_IP_RANGES", "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES")
_OF_SUBNET = {"ALL_IP_RANGES", "PRIMARY_IP_RANGE"}
#: A problem and the command that fixes it.
Result = tuple[str, str]


def existing_network(rest: Rest, settings: Settings, *, is_up: bool) -> Finding | list[Finding]:
    """Check subnet, ranges, NAT and room; `is_up` leaves out the addresses that the stack itself uses."""
    existing = settings.network.existing
    if existing is None:
        return skipped("the stack creates its own network")
    project = f"compute/v1/projects/{settings.gcp_project}"
    of_subnet = f"{project}/regions/{settings.region}/subnetworks/{existing.subnetwork}"
    vpc = _find(rest, f"{project}/global/networks/{existing.network}")
    # Compute counts the free addresses of a subnet's ranges only on request.
    subnet = _find(rest, of_subnet, views="WITH_UTILIZATION")
    missing = []
    if vpc is None:
        fix = "pulumi config set --path network.existing.network <name>; gcloud compute networks list"
        missing.append((f"no network {existing.network} in project {settings.gcp_project}", fix))
    if subnet is None:
        listing = f"gcloud compute networks subnets list --regions {settings.region}"
        fix = f"pulumi config set --path network.existing.subnetwork <name>; {listing}"
        missing.append((f"no subnet {existing.subnetwork} in {settings.region}", fix))
    if vpc is None or subnet is None:
        return [problem(EXISTING_NETWORK, result, fix=fix) for result, fix in missing]
    network = _Network(rest, settings, existing, vpc, subnet)
    results = [*network.subnet_problems(), *network.nat_problems(), *network.service_problems()]
    results += [] if is_up else [*network.room_problems(), *network.control_plane_problems()]
    found = [problem(EXISTING_NETWORK, result, fix=fix) for result, fix in results]
    return found or network.summary()


def _find(rest: Rest, path: str, **query: str) -> Mapping[str, Any] | None:
    """Return a resource of Compute, None if it does not exist."""
    try:
        return rest.get("compute", path, **query)
    except ApiError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return None


@dataclass(frozen=True)
class _Network:
    """The VPC and the subnet of a stack; each method yields problems with their fixes."""

    rest: Rest
    settings: Settings
    existing: ExistingNetwork
    vpc: Mapping[str, Any]
    subnet: Mapping[str, Any]

    @property
    def _ranges(self) -> dict[str, IPv4Network]:
        """Return the subnet's secondary ranges by name."""
        listed = self.subnet.get("secondaryIpRanges", ())
        return {str(item["rangeName"]): IPv4Network(item["ipCidrRange"]) for item in listed}

    def _list(self, path: str) -> list[Mapping[str, Any]]:
        """Return those of a list of the project that belong to the VPC."""
        items = self.rest.list_all("compute", f"compute/v1/projects/{self.settings.gcp_project}/{path}", "items")
        return [item for item in items if _name(item.get("network", "")) == self.existing.network]

    def _update(self, option: str) -> str:
        """Return the command that changes the subnet."""
        name, region = self.existing.subnetwork, self.settings.region
        return f"gcloud compute networks subnets update {name} --region {region} {option}"

    def subnet_problems(self) -> Iterator[Result]:
        """Yield another VPC, missing secondary ranges, and Private Google Access that is off."""
        name = self.existing.subnetwork
        if _name(self.subnet["network"]) != self.existing.network:
            actual = _name(self.subnet["network"])
            yield (
                f"{name} is in {actual}, not in {self.existing.network}",
                (f"pulumi config set --path network.existing.network {actual}"),
            )
        if (purpose := self.subnet.get("purpose", "PRIVATE")) != "PRIVATE":
            yield f"{name} has the purpose {purpose} and takes no nodes", "a subnet with the purpose PRIVATE"
        for key in ("pods_range", "services_range"):
            expected = getattr(self.existing, key)
            if expected not in self._ranges:
                has = ", ".join(self._ranges) or "none"
                add = self._update(f"--add-secondary-ranges {expected}=<range>")
                fix = f"{add}, or: pulumi config set --path network.existing.{key} <name>"
                yield f"{name} has no secondary range {expected}; it has {has}", fix
        if not self.subnet.get("privateIpGoogleAccess"):
            result = f"Private Google Access of {name} is off: nodes reach the bucket and the registry only through NAT"
            yield result, self._update("--enable-private-ip-google-access")

    def nat_problems(self) -> Iterator[Result]:
        """Yield a missing default route, and a missing NAT if that route leads to the internet.

        https://cloud.google.com/nat/docs/nat-product-interactions
        """
        network, region = self.existing.network, self.settings.region
        routes = [one for one in self._list("global/routes") if one["destRange"] == "0.0.0.0/0" and not one.get("tags")]
        if not routes:
            create = f"gcloud compute routes create {network}-default --network {network} --destination-range 0.0.0.0/0"
            yield f"{network} has no default route", f"{create} --next-hop-gateway default-internet-gateway"
            return
        first = min(routes, key=lambda route: int(route.get("priority", 1000)))
        routers = self._list(f"regions/{region}/routers")
        if not first.get("nextHopGateway") or any(
            self._translates(nat) for one in routers for nat in one.get("nats", ())
        ):
            return
        router = routers[0]["name"] if routers else f"{network}-router"
        create = "" if routers else f"gcloud compute routers create {router} --network {network} --region {region}; "
        options = "--nat-all-subnet-ip-ranges --auto-allocate-nat-external-ips"
        result = f"no Cloud NAT for {self.existing.subnetwork}, and its nodes have no public addresses"
        yield result, f"{create}gcloud compute routers nats create nat --router {router} --region {region} {options}"

    def _translates(self, nat: Mapping[str, Any]) -> bool:
        """Return whether a NAT gateway serves the nodes."""
        if nat.get("type", "PUBLIC") != "PUBLIC":
            return False
        subnets = [one for one in nat.get("subnetworks", ()) if _name(one["name"]) == self.existing.subnetwork]
        listed = any(_OF_SUBNET & set(one.get("sourceIpRangesToNat", ())) for one in subnets)
        return listed or nat.get("sourceSubnetworkIpRangesToNat") in _OF_ALL_SUBNETS

    def service_problems(self) -> Iterator[Result]:
        """Yield a missing connection for services, if Filestore is to use it."""
        if not self.existing.private_service_access:
            return
        network = self.existing.network
        reserved = [one for one in self._list("global/addresses") if one.get("purpose") == _SERVICES_PURPOSE]
        names = ",".join(str(one["name"]) for one in reserved) or f"{network}-services"
        reserve = f"gcloud compute addresses create {names} --global --purpose {_SERVICES_PURPOSE} --prefix-length 24"
        connect = f"gcloud services vpc-peerings connect --network {network} --ranges {names}"
        peerings = {str(one["name"]): one["state"] for one in self.vpc.get("peerings", ())}
        if not reserved:
            yield f"{network} reserves no range for services", f"{reserve} --network {network}; {connect}"
        elif peerings.get(_SERVICES_PEERING) != "ACTIVE":
            state = peerings.get(_SERVICES_PEERING, "missing").lower()
            yield f"the connection of {network} to {_SERVICES_PEERING} is {state}", connect

    def room_problems(self) -> Iterator[Result]:
        """Yield ranges with too few free addresses for `gpu.nodes.max`; an upgrade adds a system node."""
        nodes = self.settings.gpu.nodes.max + self.settings.system.num_nodes + 1
        needed = {"": nodes, self.existing.pods_range: nodes * POD_ADDRESSES_PER_NODE}
        usages = (self.subnet.get("utilizationDetails") or {}).get("ipv4Utilizations", ())
        # The primary range has no name.
        free = {str(one.get("rangeName", "")): int(one["totalFreeIp"]) for one in usages if "totalFreeIp" in one}
        sizes = {name: network.num_addresses for name, network in self._ranges.items()}
        sizes[""] = IPv4Network(self.subnet["ipCidrRange"]).num_addresses - NUM_RESERVED
        for name, count in needed.items():
            room = free.get(name, sizes.get(name, count))
            if room < count:
                of_range = f"range {name} of " if name else ""
                most = room // (POD_ADDRESSES_PER_NODE if name else 1) - self.settings.system.num_nodes - 1
                result = f"{of_range}{self.existing.subnetwork} has {room} free addresses, {count} needed for"
                fewer = f"pulumi config set --path gpu.nodes.max {max(1, most)}"
                grow = "a larger range" if name or most < 1 else f"{self._expand()}, a larger subnet"
                yield f"{result} gpu.nodes.max and the system nodes", f"{grow}, or {fewer}" if most >= 1 else grow
        services = self.existing.services_range
        if sizes.get(services, NUM_SERVICES) < NUM_SERVICES:
            result = f"range {services} of {self.existing.subnetwork} has {sizes[services]} addresses, {NUM_SERVICES}"
            yield (
                f"{result} needed for services",
                "a larger range: pulumi config set --path network.existing.services_range",
            )

    def _expand(self) -> str:
        """Return the command that makes the primary range twice as large."""
        name, prefix = self.existing.subnetwork, IPv4Network(self.subnet["ipCidrRange"]).prefixlen - 1
        region = self.settings.region
        return f"gcloud compute networks subnets expand-ip-range {name} --region {region} --prefix-length {prefix}"

    def control_plane_problems(self) -> Iterator[Result]:
        """Yield a range of the control plane that a subnet or a peer of the VPC uses."""
        cidr = IPv4Network(self.settings.network.control_plane_cidr)
        taken = [IPv4Network(one["destRange"]) for one in self._list("global/routes")
                 if ":" not in one["destRange"] and one["destRange"] != "0.0.0.0/0"]  # fmt: skip
        taken += [IPv4Network(self.subnet["ipCidrRange"]), *self._ranges.values()]
        used = sorted({str(one) for one in taken if one.overlaps(cidr)})
        if used:
            blocks = IPv4Network("172.16.0.0/16").subnets(new_prefix=28)
            free = next((block for block in blocks if not any(block.overlaps(one) for one in taken)), "<range>")
            result = f"network.control_plane_cidr {cidr} overlaps {', '.join(used)} of {self.existing.network}"
            yield result, f"pulumi config set --path network.control_plane_cidr {free}"

    def summary(self) -> Finding:
        """Return the finding without problems, with a hint if small packets slow down NCCL's traffic.

        Only Fast Socket uses this VPC for it: the cards of GPUDirect-TCPX have networks of their own.
        """
        mtu = int(self.vpc.get("mtu", 1460))
        result = f"{self.existing.subnetwork} of {self.existing.network}: ranges, NAT and room, MTU {mtu}"
        if mtu >= MTU_BYTES or not self.settings.fast_socket or self.settings.gpu.nodes.max < 2:
            return ok(result)
        update = f"gcloud compute networks update {self.existing.network} --mtu 8896, while no machine runs in it"
        return Finding("ok", f"{result}, and NCCL is faster with {MTU_BYTES}", update, EXISTING_NETWORK.key)


def _name(url: str) -> str:
    """Return the last part of a resource's URL."""
    return str(url).rpartition("/")[2]
