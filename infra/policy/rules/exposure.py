"""Nothing of a stack answers the whole internet: no node, no API server, no bucket, registry or service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network
from typing import Any

from infra.policy.reading import Config, Props, Resource, dicts, is_shell, listed, matches, resource_rule, strings

#: Words of the clouds for anyone.
_ANYONE = {"*", "any", "internet"}
_INTERNAL = (
    "service.beta.kubernetes.io/aws-load-balancer-scheme",
    "service.beta.kubernetes.io/aws-load-balancer-internal",
    "service.beta.kubernetes.io/azure-load-balancer-internal",
    "networking.gke.io/load-balancer-type",
    "cloud.google.com/load-balancer-type",
)


def is_open(source: Any) -> bool:
    """Whether a range lets in anyone: everything, or a half or a quarter of it."""
    text = str(source).lower()
    if text in _ANYONE:
        return True
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return False  # a tag, a group or a service of the cloud
    return network.prefixlen < (8 if network.version == 4 else 16)


def _opens(values: Iterable[Any], what: str) -> Iterator[str]:
    for value in values:
        if is_open(value):
            yield f"{what} {value}: name the ranges that need it"


def _security_group(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("ingress")):
        ranges = listed(rule.get("cidrBlocks")) + listed(rule.get("ipv6CidrBlocks"))
        yield from _opens(ranges, f"ingress to port {_port(rule)} from")


def _security_group_rule(props: Props) -> Iterable[str]:
    if props.get("type", "ingress") == "ingress":
        keys = ("cidrBlocks", "ipv6CidrBlocks", "cidrIpv4", "cidrIpv6")
        yield from _opens([item for key in keys for item in listed(props.get(key))], "ingress from")


def _eks(props: Props) -> Iterable[str]:
    inner = props.get("vpcConfig") or props
    if inner.get("endpointPublicAccess", True) and "publicAccessCidrs" not in inner:
        yield "the API server answers the whole internet: set endpointPublicAccess to false, or publicAccessCidrs"
    yield from _opens(listed(inner.get("publicAccessCidrs")), "the API server answers")


def _launch_template(props: Props) -> Iterable[str]:
    for interface in dicts(props.get("networkInterfaces")):
        if str(interface.get("associatePublicIpAddress", "")).lower() == "true":
            yield "nodes get public addresses: leave associatePublicIpAddress out"


def _subnet(props: Props) -> Iterable[str]:
    if props.get("mapPublicIpOnLaunch"):
        yield "what starts in this subnet gets a public address: set mapPublicIpOnLaunch to false"


def _bucket_block(props: Props) -> Iterable[str]:
    for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
        if props.get(key, True) is not True:
            yield f"{key} is off: a bucket could be made public"


def _nsg(props: Props) -> Iterable[str]:
    for rule in dicts(props.get("securityRules")) or [props]:
        if str(rule.get("access")) == "Allow" and str(rule.get("direction")) == "Inbound":
            sources = listed(rule.get("sourceAddressPrefix")) + listed(rule.get("sourceAddressPrefixes"))
            yield from _opens(sources, f"rule {rule.get('name')} lets in")


def _aks(props: Props) -> Iterable[str]:
    access = props.get("apiServerAccessProfile") or {}
    if not access.get("enablePrivateCluster") and "authorizedIPRanges" not in access:
        yield "the API server answers the whole internet: set enablePrivateCluster, or authorizedIPRanges"
    yield from _opens(listed(access.get("authorizedIPRanges")), "the API server answers")
    for pool in dicts(props.get("agentPoolProfiles")):
        yield from _aks_pool(pool)


def _aks_pool(props: Props) -> Iterable[str]:
    if props.get("enableNodePublicIP"):
        yield "nodes get public addresses: set enableNodePublicIP to false"


def _azure_service(props: Props) -> Iterable[str]:
    inner = props.get("properties") or props
    rules = inner.get("networkRuleSet") or inner.get("networkAcls") or {}
    if inner.get("publicNetworkAccess", "Enabled") != "Disabled" and rules.get("defaultAction") != "Deny":
        yield "answers the whole internet: set publicNetworkAccess to Disabled, or the rules' defaultAction to Deny"
    if inner.get("allowBlobPublicAccess"):
        yield "blobs may be made public: set allowBlobPublicAccess to false"
    yield from _opens(
        [rule.get("value") or rule.get("iPAddressOrRange") for rule in dicts(rules.get("ipRules"))], "lets in"
    )


def _firewall(props: Props) -> Iterable[str]:
    if props.get("direction", "INGRESS") == "INGRESS" and props.get("allows"):
        yield from _opens(listed(props.get("sourceRanges")), "the firewall lets in")


def _gke(props: Props) -> Iterable[str]:
    private = props.get("privateClusterConfig") or {}
    if not private.get("enablePrivateNodes"):
        yield "nodes get public addresses: set privateClusterConfig.enablePrivateNodes"
    authorized = props.get("masterAuthorizedNetworksConfig")
    if not private.get("enablePrivateEndpoint") and not authorized:
        yield "the API server answers the whole internet: set enablePrivateEndpoint, or masterAuthorizedNetworksConfig"
    blocks = [block.get("cidrBlock") for block in dicts((authorized or {}).get("cidrBlocks"))]
    yield from _opens(blocks, "the API server answers")


def _gke_pool(props: Props) -> Iterable[str]:
    if (props.get("networkConfig") or {}).get("enablePrivateNodes") is False:
        yield "nodes get public addresses: set networkConfig.enablePrivateNodes"


def _gcs(props: Props) -> Iterable[str]:
    if props.get("publicAccessPrevention") != "enforced":
        yield "objects may be made public: set publicAccessPrevention to enforced"


def _service(props: Props) -> Iterable[str]:
    spec, annotations = props.get("spec") or {}, (props.get("metadata") or {}).get("annotations") or {}
    if spec.get("type") == "LoadBalancer" and not any(
        str(annotations.get(key, "")).lower() in {"internal", "true"} for key in _INTERNAL
    ):
        ranges = listed(spec.get("loadBalancerSourceRanges"))
        if not ranges:
            yield "a load balancer that answers the whole internet: make it internal, or set loadBalancerSourceRanges"
        yield from _opens(ranges, "the load balancer answers")


_TYPES: dict[str, Callable[[Props], Iterable[str]]] = {
    "aws:ec2/launchTemplate:LaunchTemplate": _launch_template,
    "aws:ec2/securityGroup:SecurityGroup": _security_group,
    "aws:ec2/securityGroupRule:SecurityGroupRule": _security_group_rule,
    "aws:ec2/subnet:Subnet": _subnet,
    "aws:eks/cluster:Cluster": _eks,
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": _bucket_block,
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _security_group_rule,
    "azure-native:containerregistry:Registry": _azure_service,
    "azure-native:containerservice:AgentPool": _aks_pool,
    "azure-native:containerservice:ManagedCluster": _aks,
    "azure-native:dashboard:Grafana": _azure_service,
    "azure-native:keyvault:Vault": _azure_service,
    "azure-native:network:NetworkSecurityGroup": _nsg,
    "azure-native:network:SecurityRule": _nsg,
    "azure-native:storage:StorageAccount": _azure_service,
    "eks:index:Cluster": _eks,
    "gcp:compute/firewall:Firewall": _firewall,
    "gcp:container/cluster:Cluster": _gke,
    "gcp:container/nodePool:NodePool": _gke_pool,
    "gcp:storage/bucket:Bucket": _gcs,
    "kubernetes:core/v1:Service": _service,
}

_OPTIONS = {
    "exceptions": strings("Names of resources that may be public, as shell patterns, such as aws-monitoring-*.", []),
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Violations of one resource."""
    if matches(resource.name, config["exceptions"]):
        return ()
    own = None if is_shell(resource) else _TYPES.get(resource.type)
    return own(resource.props) if own else ()


def _port(rule: Props) -> str:
    low, high = int(rule.get("fromPort") or 0), int(rule.get("toPort") or 0)
    return str(low) if low == high else f"{low}-{high}"


POLICY = resource_rule(
    "nothing-public", "No node, API server, bucket, registry or service is open to 0.0.0.0/0.", check, _OPTIONS
)
