"""What Azure says before anything is made: subscription, providers and features, sizes, quota, reservation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from infra import catalog
from infra.clouds.azure import causes
from infra.clouds.azure.causes import (
    ACCOUNT,
    CREDENTIALS,
    DENIED,
    FEATURE,
    OFFER,
    OVERLAP,
    PROVIDER,
    QUOTA,
    RESERVATION,
    SUBSCRIPTION,
    UNREACHABLE,
)
from infra.clouds.azure.credentials import LOGIN
from infra.clouds.azure.settings import Settings
from infra.findings.common_causes import NO_CLIENT, SLOW
from infra.findings.model import Check, Context, Finding, QueryFailedError, ok, problem, skipped

PACKAGES = ("pulumi-azure-native",)
ENDPOINT = "https://management.azure.com"
_SCOPE = "https://management.azure.com/.default"


#: What the resources of a stack belong to; the provider registers most of them by itself where it may.
_NAMESPACES = (
    "Microsoft.Authorization", "Microsoft.Compute", "Microsoft.ContainerRegistry", "Microsoft.ContainerService",
    "Microsoft.ManagedIdentity", "Microsoft.NetApp", "Microsoft.Network", "Microsoft.Storage",
)  # fmt: skip
_OF_CLUSTERS = {"Microsoft.ContainerService", "Microsoft.NetApp"}
_OF_SERVICE = (
    "Microsoft.Insights", "Microsoft.KeyVault", "Microsoft.MachineLearningServices", "Microsoft.OperationalInsights",
)  # fmt: skip
_OF_MONITORING = ("Microsoft.Dashboard", "Microsoft.Insights", "Microsoft.Monitor")
_CONFIGURED = "azure-native:subscriptionId"
_REGISTRY = re.compile(r"^[a-z0-9]+\.azurecr\.io$")
#: The user of a registry's token, as its documentation has it.
_TOKEN_USER = str(UUID(int=0))
WHO = "credentials"
CAUSES = causes.CAUSES


class Arm:
    """Azure's management API, read only, as whoever the login chain finds."""

    def __init__(self, endpoint: str, subscription: str) -> None:
        from azure.core import PipelineClient
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy, HttpLoggingPolicy, RetryPolicy
        from azure.identity import DefaultAzureCredential

        self.subscription = subscription
        self.credential = DefaultAzureCredential(exclude_interactive_browser_credential=True, process_timeout=20)
        # Tokens go over TLS alone; a plain address is one of this machine, as in tests.
        self._safe = endpoint.startswith("https")
        token = BearerTokenCredentialPolicy(self.credential, _SCOPE)
        policies: list[Any] = [RetryPolicy(retry_total=1), token, HttpLoggingPolicy()]
        self._client: Any = PipelineClient(endpoint, policies=policies)

    def get(self, path: str, version: str, **query: str) -> Mapping[str, Any]:
        """One answer; HttpResponseError carries Azure's own code."""
        from azure.core.rest import HttpRequest

        return self._sent(HttpRequest("GET", self._client.format_url(path), params={"api-version": version, **query}))

    def _sent(self, request: Any) -> Mapping[str, Any]:
        response = self._client.send_request(request, connection_timeout=5, read_timeout=20, enforce_https=self._safe)
        response.raise_for_status()
        found: Mapping[str, Any] = response.json()
        return found

    def listed(self, path: str, version: str, **query: str) -> Iterator[Mapping[str, Any]]:
        """Every entry of a list, page after page."""
        from azure.core.rest import HttpRequest

        page = self.get(path, version, **query)
        while True:
            yield from page.get("value", ())
            following = page.get("nextLink")
            if not following:
                return
            page = self._sent(HttpRequest("GET", str(following)))

    @property
    def root(self) -> str:
        return f"/subscriptions/{self.subscription}"


def checks(context: Context) -> list[Check]:
    """Every question, the first being who asks."""
    settings = context.settings
    assert isinstance(settings, Settings)
    opened: list[Questions] = []

    def who() -> Finding:
        opened.append(Questions(Arm(ENDPOINT, chosen_subscription(context.values)), settings, context))
        return opened[0].credentials()

    asked = {
        "resource providers": Questions.providers,
        "features": Questions.features,
        "instance type": Questions.offer,
        "quota": Questions.quota,
        "reservation": Questions.reservation,
        "addresses": Questions.overlaps,
    }
    later = [Check(name, partial(_later, run, opened), WHO) for name, run in asked.items()]
    return [Check(WHO, partial(_asking, who)), *later]


def devices(settings: Settings) -> Mapping[str, int]:
    """One virtual function of InfiniBand for each GPU."""
    return {"rdma/ib": settings.instance.num_network_cards} if settings.infiniband else {}


def login(_: Context, host: str, scheme: str = "https") -> tuple[str, str] | None:
    """A registry takes the login's own token in exchange for one of its own."""
    if not _REGISTRY.match(host):
        return None

    def exchanged() -> tuple[str, str]:
        import urllib3
        from azure.identity import DefaultAzureCredential

        token = DefaultAzureCredential(exclude_interactive_browser_credential=True).get_token(_SCOPE).token
        form = urlencode({"grant_type": "access_token", "service": host, "access_token": token})
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = urllib3.request("POST", f"{scheme}://{host}/oauth2/exchange", body=form, headers=kind)
        return _TOKEN_USER, str(json.loads(answer.data).get("refresh_token", ""))

    try:
        return exchanged()
    except Exception as error:
        raise _explained(error, "") from None


@dataclass(frozen=True)
class Questions:
    """What is asked about one stack."""

    arm: Arm
    settings: Settings
    context: Context

    def credentials(self) -> Finding:
        """The subscription: which it is, whether it works, whether the stack is in it."""
        found = self.arm.get(self.arm.root, "2022-12-01")
        told = f"{found['displayName']} ({self.arm.subscription}), {found['state']}"
        before = (self.context.outputs or {}).get("account")
        if before and before != self.arm.subscription:
            return problem(ACCOUNT, f"{told}; the stack is in {before}", account=before)
        return ok(told) if found["state"] == "Enabled" else problem(SUBSCRIPTION, told)

    def providers(self) -> Finding | list[Finding]:
        """Every resource provider that the stack's resources belong to."""
        needed = (*_NAMESPACES, *(_OF_MONITORING if self.settings.monitoring.managed else ()))
        if self.settings.service:
            needed = (*(name for name in _NAMESPACES if name not in _OF_CLUSTERS), *_OF_SERVICE)
        states = {
            str(item["namespace"]).lower(): item["registrationState"]
            for item in self.arm.listed(f"{self.arm.root}/providers", "2021-04-01")
        }
        missing = {name: states.get(name.lower(), "unknown here") for name in needed}
        missing = {name: state for name, state in missing.items() if state != "Registered"}
        if missing:
            return [problem(PROVIDER, f"{name} is {state}", namespace=name) for name, state in missing.items()]
        return ok(f"{len(needed)} registered")

    def features(self) -> Finding | list[Finding]:
        """Features of the subscription that nodes need."""
        if not self.settings.required_features:
            return skipped("these nodes need none")
        found = []
        for full in self.settings.required_features:
            namespace, name = full.split("/")
            path = f"{self.arm.root}/providers/Microsoft.Features/providers/{namespace}/features/{name}"
            state = self.arm.get(path, "2021-07-01")["properties"]["state"]
            if state != "Registered":
                found.append(problem(FEATURE, f"{full} is {state}", namespace=namespace, name=name))
        return found or ok(f"{', '.join(self.settings.required_features)} registered")

    def _size(self) -> Mapping[str, Any] | None:
        """The size as the location sells it; None where it does not."""
        only = f"location eq '{self.settings.location}'"
        for item in self.arm.listed(
            f"{self.arm.root}/providers/Microsoft.Compute/skus", "2021-07-01", **{"$filter": only}
        ):
            if item["resourceType"] == "virtualMachines" and item["name"] == self.settings.gpu.instance_type:
                return item
        return None

    def offer(self) -> Finding:
        """The location and the zone sell the size, and to this subscription."""
        kind, where = self.settings.gpu.instance_type, self.settings.location
        size = self._size()
        elsewhere = (
            f"az vm list-skus --size {kind} --all --output table, then: pulumi config set azure-native:location <one>"
        )
        if size is None:
            return problem(OFFER, f"{where} does not offer {kind}", fix=elsewhere)
        zones = sorted({zone for item in size.get("locationInfo", ()) for zone in item.get("zones", ())})
        closed: set[str] = set()
        for item in size.get("restrictions", ()):
            if item["type"] == "Location":
                told = f"{kind} in {where} is closed to this subscription ({item['reasonCode']})"
                return problem(OFFER, told, fix=f"ask for it with the quota; or {elsewhere}")
            closed |= set((item.get("restrictionInfo") or {}).get("zones", ()))
        usable = [zone for zone in zones if zone not in closed]
        wanted = self.settings.zones
        if wanted and wanted[0] not in usable:
            fix = f"pulumi config set --path gpu.zone {usable[0]}" if usable else "pulumi config rm --path gpu.zone"
            return problem(OFFER, f"zone {wanted[0]} of {where} does not offer {kind}; {_or(usable)} do", fix=fix)
        return ok(f"{kind} is offered in {where}" + (f", zones {', '.join(usable)}" if usable else ""))

    def quota(self) -> Finding:
        """Cores for the pool at its maximum beside those in use: of the size's family, or of spot."""
        if self.settings.service:
            return skipped("Azure Machine Learning has quotas of its own: Quotas in the studio, at the subscription")
        gpu = self.settings.gpu
        size = self._size()
        if size is None:
            return skipped("the location does not offer the size")
        family = "lowPriorityCores" if self.settings.interruptible else str(size["family"])
        path = f"{self.arm.root}/providers/Microsoft.Compute/locations/{self.settings.location}/usages"
        usages = {str(item["name"]["value"]).lower(): item for item in self.arm.listed(path, "2024-07-01")}
        usage = usages.get(family.lower(), {"limit": 0, "currentValue": 0})
        each = catalog.instance(self.settings.cloud, gpu.instance_type).num_vcpus
        # What this stack's own pool runs already is part of what it needs.
        running = gpu.nodes.min * each if self.context.outputs else 0
        limit, used = int(usage["limit"]), max(0, int(usage["currentValue"]) - running)
        needed = gpu.nodes.max * each
        told = f"{family}: {limit} cores, {used} in use, {needed} needed for {gpu.nodes.max} x {gpu.instance_type}"
        if used + needed <= limit:
            return ok(told)
        if self.context.outputs:
            told += "; nodes of this stack above gpu.nodes.min are among those in use"
        values = {"value": used + needed, "family": family, "location": self.settings.location}
        return problem(QUOTA, told, nodes=max(0, (limit - used) // each), **values)

    def reservation(self) -> Finding:
        """The reservation group is there and holds machines of this size."""
        group = self.settings.gpu.reservation_id
        if not group:
            return skipped(f"gpu.capacity is {self.settings.gpu.capacity}")
        from azure.core.exceptions import HttpResponseError

        choose = "pulumi config set --path gpu.reservation_id <id>; az capacity reservation group list"
        try:
            place = str(self.arm.get(group, "2024-07-01")["location"]).lower().replace(" ", "")
        except HttpResponseError as error:
            if error.status_code != 404:  # HTTP: not found
                raise
            return problem(RESERVATION, f"no reservation group {group.rpartition('/')[2]}", fix=choose)
        name = group.rpartition("/")[2]
        if place != self.settings.location:
            return problem(RESERVATION, f"{name} is in {place}, the stack in {self.settings.location}", fix=choose)
        held = list(self.arm.listed(f"{group}/capacityReservations", "2024-07-01"))
        count = sum(
            int(item["sku"]["capacity"]) for item in held if item["sku"]["name"] == self.settings.gpu.instance_type
        )
        told = f"{name} holds {count} x {self.settings.gpu.instance_type} in {place}"
        if count < self.settings.gpu.nodes.desired:
            return problem(RESERVATION, told, fix=f"pulumi config set --path gpu.nodes.desired {count}; or {choose}")
        return ok(told)

    def overlaps(self) -> Finding:
        """Other VNets that the stack's could not be connected with."""
        if self.context.outputs:
            return skipped("the stack has its network")
        mine = IPv4Network(self.settings.network.cidr)
        taken = [
            (str(net["name"]), IPv4Network(cidr))
            for net in self.arm.listed(f"{self.arm.root}/providers/Microsoft.Network/virtualNetworks", "2024-05-01")
            for cidr in net["properties"]["addressSpace"]["addressPrefixes"]
            if ":" not in cidr
        ]
        met = [f"{name} ({cidr})" for name, cidr in taken if cidr.overlaps(mine)]
        if not met:
            return ok(f"{mine} meets none of {len(taken)} ranges")
        blocks = IPv4Network("10.0.0.0/8").subnets(new_prefix=mine.prefixlen)
        free = next((block for block in blocks if not any(block.overlaps(cidr) for _, cidr in taken)), "<range>")
        # Separate networks may use the same addresses: nothing to fix unless they are to be joined.
        told = f"{mine} overlaps {', '.join(met)}; harmless unless they are connected"
        return Finding("ok", told, OVERLAP.format_fix({"free": free}), OVERLAP.key)


def chosen_subscription(values: Mapping[str, str]) -> str:
    """The one that the provider would use: configuration, environment, then the default of `az`."""
    named = values.get(_CONFIGURED) or os.environ.get("ARM_SUBSCRIPTION_ID") or os.environ.get("AZURE_SUBSCRIPTION_ID")
    if named:
        return named
    program = shutil.which("az")
    if program is None:
        raise QueryFailedError(
            SUBSCRIPTION, "no `az` on PATH, no ARM_SUBSCRIPTION_ID, and no azure-native:subscriptionId"
        )
    answer = subprocess.run(  # noqa: S603 - `az`, with arguments of our own
        [program, "account", "show", "--query", "id", "--output", "tsv"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=25,
    )
    if answer.returncode or not answer.stdout.strip():
        told = " ".join(answer.stderr.split())[:200] or "`az account show` names no subscription"
        raise QueryFailedError(CREDENTIALS, told, is_problem=True, login=LOGIN)
    return answer.stdout.strip()


def _or(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _later(run: Callable[[Questions], Finding | list[Finding]], opened: Sequence[Questions]) -> Finding | list[Finding]:
    return _asking(lambda: run(opened[0]), opened[0].arm.subscription)


def _asking(run: Callable[[], Finding | list[Finding]], subscription: str = "") -> Finding | list[Finding]:
    try:
        return run()
    except Exception as error:
        raise _explained(error, subscription) from None


def _explained(error: Exception, subscription: str) -> Exception:
    """What the client raises as a row with its cause; anything else as it is."""
    if isinstance(error, QueryFailedError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return QueryFailedError(NO_CLIENT, f"the Python package {error.name} is missing")
    from azure.core import exceptions

    told = " ".join(str(getattr(error, "message", None) or error).split())[:300]
    if isinstance(error, exceptions.ClientAuthenticationError):
        return QueryFailedError(CREDENTIALS, told, is_problem=True, login=LOGIN)
    if isinstance(error, exceptions.HttpResponseError):
        if error.status_code == 429 or (error.status_code or 0) >= 500:  # HTTP: too many requests, its own fault
            return QueryFailedError(SLOW, told)
        if error.status_code == 401:  # HTTP: unauthorised
            return QueryFailedError(CREDENTIALS, told, is_problem=True, login=LOGIN)
        if error.status_code == 403:  # HTTP: forbidden
            return QueryFailedError(DENIED, told, subscription=subscription or "<id>")
        if error.status_code == 404 and "Subscription" in told:  # HTTP: not found
            return QueryFailedError(SUBSCRIPTION, told, is_problem=True)
        return error
    if isinstance(error, exceptions.AzureError):
        return QueryFailedError(UNREACHABLE, told)
    return error
