"""Checks that compare several settings: pure functions that return the problems they find."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network
from itertools import combinations

from infra import catalog
from infra.config.problems import Problem, fix_by_removing, fix_by_setting, quote
from infra.cost import CostLine, HourlyCost

BUDGET_KEY, ACCESS_KEY, CIDRS_KEY = "budget.max_usd_per_hour", "network.api_access", "network.authorized_cidrs"
#: The value of `network.api_access` that needs `network.authorized_cidrs`.
BY_RANGES = "authorized_ranges"
#: Prints this machine's public address, as the API server will see it.
_OWN_ADDRESS = '"$(curl -s https://checkip.amazonaws.com)/32"'
_PRIVATE_RANGES = (IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
#: Ranges that never arrive from the internet: private, this host, carrier-grade NAT, link-local, multicast, reserved.
#: https://www.iana.org/assignments/iana-ipv4-special-registry. The ranges of examples (TEST-NET) stay allowed.
_NOT_PUBLIC = (
    *_PRIVATE_RANGES,
    *map(IPv4Network, ("0.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")),
)
#: No registry assigns a wider range to one organisation.
_WIDEST_PREFIX = 8


def node_counts(low: int, desired: int, high: int, key: str = "gpu.nodes") -> list[Problem]:
    """Check that min <= desired <= max."""
    problems = []
    if desired > high:
        fix = fix_by_setting(f"{key}.max", desired)
        problems.append(Problem(f"{key}.desired", f"more than {key}.max ({high})", f"{low} to {high}", fix, desired))
    if low > desired:
        allowed, fix = f"0 to {key}.desired ({desired})", fix_by_setting(f"{key}.min", desired)
        problems.append(Problem(f"{key}.min", f"more than {key}.desired ({desired})", allowed, fix, low))
    return problems


def reservation(capacity: str, reservation_id: str | None, reserved: Iterable[str]) -> list[Problem]:
    """Check that `gpu.reservation_id` is set if, and only if, the capacity is one of `reserved`."""
    key, required = "gpu.reservation_id", capacity in set(reserved)
    if reservation_id and not required:
        message = f"capacity {capacity!r} does not come from a reservation"
        allowed = f"only with gpu.capacity {' | '.join(sorted(reserved)) or 'no capacity of this cloud'}"
        return [Problem(key, message, allowed, fix_by_removing(key), reservation_id)]
    if required and not reservation_id:
        message = f"missing, and gpu.capacity is {capacity!r}"
        return [Problem(key, message, "the id of the reservation", fix_by_setting(key, "<id>"))]
    return []


def one_of(key: str, value: str, allowed: Iterable[str]) -> list[Problem]:
    """Check that `value` is one of `allowed`; the fix proposes the closest one."""
    options = sorted(allowed)
    if value in options:
        return []
    close = difflib.get_close_matches(value, options, n=1) or options[:1]
    fix = fix_by_setting(key, close[0] if close else "<value>")
    return [Problem(key, "unknown value", " | ".join(options), fix, value)]


def instance_of_cloud(cloud: str, name: str, key: str = "gpu.instance_type") -> list[Problem]:
    """Check that the cloud offers the instance type."""
    own = {item.name for item in catalog.instances(cloud)}
    if name in own:
        return []
    other = next((item.cloud for item in catalog.instances() if item.name == name), None)
    message = f"an instance type of {other}, and cloud is {cloud!r}" if other else f"not in the catalog of {cloud!r}"
    return [Problem(key, message, problem.allowed, problem.fix, name) for problem in one_of(key, name, own)]


def zone_in_region(zone_key: str, zone: str, region: str, separator: str = "") -> list[Problem]:
    """Check that the zone's name is its region's name, the separator and one letter."""
    suffix = zone.removeprefix(region + separator)
    if zone.startswith(region + separator) and len(suffix) == 1 and suffix.isalpha():
        return []
    example = f"{region}{separator}a"
    allowed = f"{example}, {region}{separator}b ..."
    return [Problem(zone_key, f"not a zone of {region}", allowed, fix_by_setting(zone_key, example), zone)]


def disjoint(cidrs: Mapping[str, str]) -> list[Problem]:
    """Check that no two ranges overlap; the fix moves the later key of a pair."""
    networks = {key: IPv4Network(cidr) for key, cidr in cidrs.items()}
    problems = []
    for (one, first), (two, second) in combinations(networks.items(), 2):
        if first.overlaps(second):
            fix = fix_by_setting(two, _free_network(second.prefixlen, networks.values()))
            problems.append(Problem(two, f"overlaps {one} ({first})", "a range of its own", fix, str(second)))
    return problems


def _free_network(prefix: int, taken: Iterable[IPv4Network]) -> IPv4Network:
    """Return the first private range of this size that overlaps none of `taken`."""
    taken = list(taken)
    for private in _PRIVATE_RANGES:
        if prefix < private.prefixlen:
            continue
        for candidate in private.subnets(new_prefix=min(max(prefix, private.prefixlen), private.prefixlen + 12)):
            if not any(candidate.overlaps(network) for network in taken):
                return next(candidate.subnets(new_prefix=prefix)) if prefix > candidate.prefixlen else candidate
    return IPv4Network("100.64.0.0/10")


def inside(key: str, cidr: str, outer_key: str, outer: str) -> list[Problem]:
    """Check that a subnet is part of its network."""
    network, outer_network = IPv4Network(cidr), IPv4Network(outer)
    if network.subnet_of(outer_network):
        return []
    proposal = next(outer_network.subnets(new_prefix=max(network.prefixlen, outer_network.prefixlen)))
    fix = fix_by_setting(key, proposal)
    return [Problem(key, f"outside {outer_key} ({outer})", f"a range within {outer}", fix, cidr)]


def holds(key: str, cidr: str, num_addresses: int, purpose: str, num_reserved: int = 5) -> list[Problem]:
    """Check that a subnet has `num_addresses` besides the `num_reserved` that a cloud keeps in each subnet."""
    network = IPv4Network(cidr)
    if network.num_addresses - num_reserved >= num_addresses:
        return []
    prefix = 32 - (num_addresses + num_reserved - 1).bit_length()
    message = f"{network.num_addresses - num_reserved} usable addresses, {num_addresses} needed for {purpose}"
    wider = network.supernet(new_prefix=prefix)
    return [Problem(key, message, f"/{prefix} or wider", fix_by_setting(key, wider), cidr)]


def api_access(access: str, authorized: Sequence[str]) -> list[Problem]:
    """Check that ranges are authorized only for an API that accepts them."""
    if access == BY_RANGES or not authorized:
        return []
    message, allowed = f"ignored, because {ACCESS_KEY} is {access!r}", f"unset, or {ACCESS_KEY} {BY_RANGES}"
    return [Problem(CIDRS_KEY, message, allowed, fix_by_removing(CIDRS_KEY), ", ".join(authorized))]


def public_ranges(authorized: Sequence[str]) -> list[Problem]:
    """Check that each authorized range is public and not most of the internet; the last one is reported first.

    A removal moves the entries after it, so the commands work only from the last entry to the first.
    """
    problems = []
    for index, cidr in reversed(list(enumerate(authorized))):
        key, network = f"{CIDRS_KEY}[{index}]", IPv4Network(cidr)
        if network.prefixlen < _WIDEST_PREFIX:
            fix = f"pulumi config set --path {quote(key)} {_OWN_ADDRESS}"
            problems.append(Problem(key, "most of the internet", "your own public addresses", fix, cidr))
        elif any(network.subnet_of(other) for other in _NOT_PUBLIC):
            message = "a private range, which never arrives from the internet"
            allowed = "a public range; the cluster's own network always reaches the API"
            problems.append(Problem(key, message, allowed, fix_by_removing(key), cidr))
    return problems


def stack_name(stack: str, cloud: str, pattern: str, longest: int, allowed: str) -> list[Problem]:
    """Check that a cloud accepts the stack's name; the fix renames this stack, whichever one is selected."""
    if re.fullmatch(pattern, stack) and len(stack) <= longest:
        return []
    words = re.sub(r"[^a-z0-9]+", "-", stack.lower()).replace("goog", "g").strip("-")
    proposal = (words if words[:1].isalpha() else f"stack-{words}")[:longest].rstrip("-")
    move = f"mv -n {quote(f'Pulumi.{stack}.yaml')} Pulumi.{proposal}.yaml"
    fix = f"pulumi stack rename --stack {quote(stack)} {proposal}, or before `pulumi stack init`: {move}"
    return [Problem("stack", f"a name that {cloud} rejects", allowed, fix, stack)]


def no_api_access(stack: str, access: str, ways: Sequence[str]) -> Problem:
    """Return the problem of a stack whose API would refuse this machine, after its control plane was paid for."""
    message = "network.authorized_cidrs is empty, so `up` could not reach the Kubernetes API"
    others = [way for way in ways if way != BY_RANGES]
    allowed = " | ".join([f"{BY_RANGES} with this machine's public address", *others])
    fix = f"pulumi config set --stack {stack} --path 'network.authorized_cidrs[0]' {_OWN_ADDRESS}"
    return Problem(ACCESS_KEY, message, allowed, fix, access)


def size_step(key: str, size_gib: int, allowed: str, nearest: int | None) -> list[Problem]:
    """Check a size that a service offers in steps; `nearest` is the closest allowed size, None if it is allowed."""
    if nearest is None:
        return []
    return [Problem(key, "a size that the service refuses", allowed, fix_by_setting(key, nearest), size_gib)]


def budget(max_usd_per_hour: float | None, lines: Sequence[CostLine], interruptible: bool) -> list[Problem]:
    """Check the cost of a stack whose pool is at its maximum against the budget."""
    total = HourlyCost(lines)
    billed = total.billed(interruptible)
    if max_usd_per_hour is None or billed <= max_usd_per_hour:
        return []
    items = " + ".join(f"{line.count:g} x {line.what} at {line.on_demand_usd_per_hour:g}" for line in lines)
    unknown = interruptible and total.spot_usd is None
    note = " (no spot price known, on demand counted)" if unknown else ""
    message = f"the stack costs {billed:.2f} USD per hour at gpu.nodes.max: {items}{note}"
    # Half a cent more, so that rounding to cents never proposes less than the cost.
    fix = fix_by_setting(BUDGET_KEY, f"{billed + 0.005:.2f}")
    return [Problem(BUDGET_KEY, message, f"at least {billed:.2f}, or fewer nodes", fix, max_usd_per_hour)]
