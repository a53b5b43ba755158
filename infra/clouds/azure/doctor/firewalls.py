"""Whether the inbound rules of a network security group admit a connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

_ANY = IPv4Network("0.0.0.0/0")
_DEFAULT = "DenyAllInBound"


@dataclass(frozen=True)
class Flow:
    """TCP connections from one range to another, at one port, or at all ports without one."""

    source: str
    destination: str
    port: int | None = None


def blocking_rule(rules: Iterable[Mapping[str, Any]], flow: Flow, vnet: Sequence[str]) -> str:
    """Return the name of the rule that blocks a part of the flow, empty if all of it is admitted.

    The first rule that matches decides; the last two, which Azure adds, admit the VNet and deny everything else. Other
    service tags than VirtualNetwork match no private range.
    https://learn.microsoft.com/azure/virtual-network/network-security-groups-overview
    """
    for name, rule in sorted(((item["name"], item["properties"]) for item in rules), key=_priority):
        if rule["direction"] != "Inbound" or rule["protocol"].lower() not in ("*", "tcp"):
            continue
        sides = (("source", flow.source), ("destination", flow.destination))
        ranges = [(_ranges(rule, side, vnet), IPv4Network(cidr)) for side, cidr in sides]
        if rule["access"] == "Allow":
            if all(_covers(found, cidr) for found, cidr in ranges) and _ports(rule, flow.port, all_of_them=True):
                return ""
        elif all(any(one.overlaps(cidr) for one in found) for found, cidr in ranges) and _ports(rule, flow.port):
            return str(name)
    of_vnet = [IPv4Network(cidr) for cidr in vnet]
    inside = all(_covers(of_vnet, IPv4Network(cidr)) for cidr in (flow.source, flow.destination))
    return "" if inside else _DEFAULT


def _priority(item: tuple[str, Mapping[str, Any]]) -> int:
    """Return the number of a rule; lower ones come first."""
    return int(item[1]["priority"])


def _both(rule: Mapping[str, Any], key: str, plural: str) -> list[str]:
    """Return the values of a key and of its plural: Azure fills in one of them."""
    return [str(value) for value in (rule.get(key), *(rule.get(plural) or ())) if value]


def _ranges(rule: Mapping[str, Any], side: str, vnet: Sequence[str]) -> list[IPv4Network]:
    """Return the ranges of one side of a rule; a service tag other than VirtualNetwork has none here."""
    found: list[IPv4Network] = []
    for value in _both(rule, f"{side}AddressPrefix", f"{side}AddressPrefixes"):
        if value in ("*", "Any"):
            found.append(_ANY)
        elif value == "VirtualNetwork":
            found += [IPv4Network(cidr) for cidr in vnet]
        elif value[0].isdigit() and ":" not in value:
            found.append(IPv4Network(value, strict=False))
    return found


def _covers(ranges: Iterable[IPv4Network], cidr: IPv4Network) -> bool:
    """Return whether one of the ranges contains another one."""
    return any(cidr.subnet_of(one) for one in ranges)


def _ports(rule: Mapping[str, Any], port: int | None, *, all_of_them: bool = False) -> bool:
    """Return whether a rule is about a port; without one about any port, or about all of them."""
    spans = []
    for value in _both(rule, "destinationPortRange", "destinationPortRanges"):
        first, _, last = ("0-65535" if value == "*" else value).partition("-")
        spans.append((int(first), int(last or first)))
    if port is not None:
        return any(first <= port <= last for first, last in spans)
    return bool(spans) if not all_of_them else any(first <= 1 and last == 65535 for first, last in spans)
