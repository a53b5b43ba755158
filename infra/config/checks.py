"""Checks across settings that a single field's type cannot make; pure, each returns the problems it found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network
from itertools import combinations

from infra import catalog
from infra.config.problems import Problem, fix_by_setting


def node_counts(low: int, desired: int, high: int, key: str = "gpu.nodes") -> list[Problem]:
    """The pool's counts must satisfy min <= desired <= max."""
    problems = []
    if desired > high:
        problems.append(
            Problem(
                f"{key}.desired",
                f"more than {key}.max ({high})",
                f"{low} to {high}",
                fix_by_setting(f"{key}.max", desired),
                desired,
            )
        )
    if low > desired:
        legal = f"0 to {key}.desired ({desired})"
        problems.append(
            Problem(
                f"{key}.min", f"more than {key}.desired ({desired})", legal, fix_by_setting(f"{key}.min", desired), low
            )
        )
    return problems


def reservation(capacity: str, reservation_id: str | None, reserved: Iterable[str]) -> list[Problem]:
    """`gpu.reservation_id` belongs to the capacities in `reserved`, and those need one."""
    needs = capacity in set(reserved)
    with_one = " | ".join(sorted(reserved)) or "no capacity of this cloud"
    if reservation_id and not needs:
        wrong = f"capacity {capacity!r} does not come from a reservation"
        legal = f"only with gpu.capacity {with_one}"
        return [
            Problem("gpu.reservation_id", wrong, legal, "pulumi config rm --path gpu.reservation_id", reservation_id)
        ]
    if needs and not reservation_id:
        wrong = f"missing, and gpu.capacity is {capacity!r}"
        legal = "the id of the reservation"
        return [Problem("gpu.reservation_id", wrong, legal, fix_by_setting("gpu.reservation_id", "<id>"))]
    return []


def one_of(key: str, value: str, legal: Iterable[str]) -> list[Problem]:
    """`value` must be one of `legal`; the closest one is offered."""
    options = sorted(legal)
    if value in options:
        return []
    close = difflib.get_close_matches(value, options, n=1) or options[:1]
    return [
        Problem(
            key, "not known here", " | ".join(options), fix_by_setting(key, close[0] if close else "<value>"), value
        )
    ]


def instance_of_cloud(cloud: str, name: str, key: str = "gpu.instance_type") -> list[Problem]:
    """The instance type must be one of the cloud's own; the legal list is printed."""
    own = {item.name for item in catalog.instances(cloud)}
    if name in own:
        return []
    other = next((item.cloud for item in catalog.instances() if item.name == name), None)
    wrong = f"an instance type of {other}, and cloud is {cloud!r}" if other else f"not in the catalog of {cloud!r}"
    return [Problem(key, wrong, problem.allowed, problem.fix, name) for problem in one_of(key, name, own)]


def zone_in_region(zone_key: str, zone: str, region: str, separator: str = "") -> list[Problem]:
    """A zone's name is its region's name, the separator and one letter."""
    suffix = zone.removeprefix(region + separator)
    if zone.startswith(region + separator) and len(suffix) == 1 and suffix.isalpha():
        return []
    example = f"{region}{separator}a"
    return [
        Problem(
            zone_key,
            f"not a zone of {region}",
            f"{example}, {region}{separator}b ...",
            fix_by_setting(zone_key, example),
            zone,
        )
    ]


def disjoint(cidrs: Mapping[str, str]) -> list[Problem]:
    """No two of the ranges may share an address; the later key of a pair is the one to move."""
    networks = {key: IPv4Network(cidr) for key, cidr in cidrs.items()}
    problems = []
    for (one, first), (two, second) in combinations(networks.items(), 2):
        if first.overlaps(second):
            free = _free_network(second.prefixlen, networks.values())
            problems.append(
                Problem(two, f"overlaps {one} ({first})", "a range of its own", fix_by_setting(two, free), str(second))
            )
    return problems


def _free_network(prefix: int, taken: Iterable[IPv4Network]) -> IPv4Network:
    """The first private range of this size that meets none of `taken`."""
    taken = list(taken)
    for private in (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16")):
        if prefix < private.prefixlen:
            continue
        for candidate in private.subnets(new_prefix=min(max(prefix, private.prefixlen), private.prefixlen + 12)):
            if not any(candidate.overlaps(network) for network in taken):
                return next(candidate.subnets(new_prefix=prefix)) if prefix > candidate.prefixlen else candidate
    return IPv4Network("100.64.0.0/10")


def inside(key: str, cidr: str, outer_key: str, outer: str) -> list[Problem]:
    """A subnet must lie within its network."""
    if IPv4Network(cidr).subnet_of(IPv4Network(outer)):
        return []
    proposal = next(
        IPv4Network(outer).subnets(new_prefix=max(IPv4Network(cidr).prefixlen, IPv4Network(outer).prefixlen))
    )
    return [
        Problem(key, f"outside {outer_key} ({outer})", f"a range within {outer}", fix_by_setting(key, proposal), cidr)
    ]


def holds(key: str, cidr: str, num_addresses: int, why: str, num_reserved: int = 5) -> list[Problem]:
    """A subnet must offer `num_addresses` after the `num_reserved` that a cloud keeps for itself in each."""
    network = IPv4Network(cidr)
    if network.num_addresses - num_reserved >= num_addresses:
        return []
    prefix = 32 - (num_addresses + num_reserved - 1).bit_length()
    wrong = f"{network.num_addresses - num_reserved} usable addresses, {num_addresses} needed for {why}"
    wider = network.supernet(new_prefix=prefix)
    return [Problem(key, wrong, f"/{prefix} or wider", fix_by_setting(key, wider), cidr)]


def size_step(key: str, size_gib: int, legal: str, nearest: int | None) -> list[Problem]:
    """A size that the service refuses: `nearest` is the closest legal one, None where `size_gib` is legal."""
    if nearest is None:
        return []
    return [Problem(key, "a size that the service refuses", legal, fix_by_setting(key, nearest), size_gib)]
