"""Simulated AWS: computed outputs, refused requests, replacements and deletion rules of the types in use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from engine_values import at
from engine_world import Inputs, PartlyCreated, Refused, Resource, Rules, World

_DEPENDENCY = "DependencyViolation"
_INTERFACE = "aws:ec2/networkInterface:NetworkInterface"
_ADDON, _NODES, _CLUSTER = "aws:eks/addon:Addon", "aws:eks/nodeGroup:NodeGroup", "aws:eks/cluster:Cluster"
_LOG_GROUP = "aws:cloudwatch/logGroup:LogGroup"
_ATTACHMENT = "aws:iam/rolePolicyAttachment:RolePolicyAttachment"
_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
_ENTRY, _CREATOR = "aws:eks/accessEntry:AccessEntry", "arn:aws:iam::123456789012:user/someone"
#: Add-ons that a node needs to become ready, and add-ons whose pods need a node.
_NODE_ADDONS = ("vpc-cni", "kube-proxy")
_POD_ADDONS = ("coredns", "metrics-server", "aws-ebs-csi-driver", "amazon-cloudwatch-observability")


def _all_of(*types: str, error: str = _DEPENDENCY) -> dict[str, str]:
    return dict.fromkeys(types, error)


def _lustre_problems(inputs: Inputs) -> Iterator[tuple[str, str]]:
    # https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystem.html
    size, speed = inputs.get("storageCapacity"), inputs.get("perUnitStorageThroughput")
    if inputs.get("deploymentType") not in ("PERSISTENT_2", "PERSISTENT_1", "SCRATCH_1", "SCRATCH_2"):
        yield "deploymentType", "no such deployment type"
    if not isinstance(size, int) or not (size == 1200 or size % 2400 == 0):
        yield "storageCapacity", "must be 1200, 2400 or a multiple of 2400"
    if speed not in (125, 250, 500, 1000):
        yield "perUnitStorageThroughput", "must be 125, 250, 500 or 1000 for PERSISTENT_2"
    if inputs.get("dataCompressionType", "NONE") not in ("NONE", "LZ4"):
        yield "dataCompressionType", "must be NONE or LZ4"
    if inputs.get("fileSystemTypeVersion", "2.15") not in ("2.12", "2.15"):
        yield "fileSystemTypeVersion", "PERSISTENT_2 has 2.12 and 2.15"


def _lustre_replaces(old: Inputs, new: Inputs) -> Iterator[str]:
    """Yield the size if it shrinks: FSx cannot shrink a file system, so the provider replaces it."""
    if new["storageCapacity"] < old["storageCapacity"]:
        yield "storageCapacity"


def _nodes_created(world: World, inputs: Inputs) -> None:
    """Refuse a node group without network add-ons: its nodes never become ready."""
    found = {resource.inputs["addonName"] for resource in world.ready(_ADDON)}
    missing = [name for name in _NODE_ADDONS if name not in found]
    if missing:
        raise Refused(f"NodeCreationFailure: Unhealthy nodes in the kubernetes cluster; no {' and no '.join(missing)}")
    _not_newer_than_the_control_plane(world, inputs)
    template = _template(world, inputs)
    if template and template.inputs.get("instanceType") and inputs.get("instanceTypes"):
        raise Refused("InvalidParameterException: instance type both in the launch template and in the node group")
    _policies_attached(world, inputs["nodeRoleArn"])


def _cluster_created(world: World, inputs: Inputs) -> None:
    """Refuse a zone without EKS: https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html.

    These letters are those of one account; the ids are use1-az3, usw1-az2 and cac1-az3 in all of them.
    """
    for subnet in world.of_type("aws:ec2/subnet:Subnet"):
        zone = subnet.inputs.get("availabilityZone")
        if subnet.id in inputs["vpcConfig"]["subnetIds"] and zone in ("us-east-1e", "us-west-1c", "ca-central-1d"):
            raise Refused(f"UnsupportedAvailabilityZoneException: EKS does not support creating cluster in {zone}")


def _minor(version: object) -> int:
    return int(str(version).split(".")[1])


def _cluster_updated(world: World, resource: Resource, inputs: Inputs) -> None:
    """Refuse an upgrade by more than one minor version, and a downgrade.

    https://docs.aws.amazon.com/eks/latest/userguide/update-cluster.html
    """
    step = _minor(inputs["version"]) - _minor(resource.inputs["version"])
    if step not in (0, 1):
        raise Refused(f"InvalidParameterException: Unsupported Kubernetes minor version update to {inputs['version']}")


def _log_group_deleted(world: World, resource: Resource) -> None:
    """Let EKS write its last lines of log, which creates the deleted group again, without tags and retention.

    https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2486, 2446 and 2763
    """
    if resource.id.startswith("/aws/eks/"):
        world.later(2, lambda: _recreate_group(world, resource.id))


def _recreate_group(world: World, name: str) -> None:
    world.add(_LOG_GROUP, name, {"name": name})


def _plane_version(world: World, cluster: object) -> object:
    planes = [one for one in world.of_type(_CLUSTER) if one.inputs["name"] == cluster]
    return planes[0].inputs["version"] if planes else None


def _not_newer_than_the_control_plane(world: World, inputs: Inputs) -> None:
    """Refuse nodes newer than the control plane: https://kubernetes.io/releases/version-skew-policy/."""
    plane = _plane_version(world, inputs["clusterName"])
    if plane and inputs.get("version") and _minor(inputs["version"]) > _minor(plane):
        raise Refused(f"InvalidParameterException: Nodegroup version {inputs['version']} is newer than {plane}")


def _addon_offered(world: World, inputs: Inputs) -> None:
    """Refuse a version of an add-on that EKS does not offer for the control plane's version."""
    plane, version = _plane_version(world, inputs["clusterName"]), inputs.get("addonVersion")
    if plane and version and not str(version).startswith(f"v{plane}."):
        raise Refused(f"InvalidParameterException: Addon version {version} specified is not supported by {plane}")


def _nodes_started(world: World, resource: Resource) -> None:
    """Fail a group whose nodes have no capacity: it exists in CREATE_FAILED, and nothing repairs it.

    https://github.com/aws/containers-roadmap/issues/2204; `waitNodegroupCreated` of terraform-provider-aws
    (internal/service/eks/node_group.go) waits for ACTIVE, and every later read returns the status.
    """
    resource.computed["status"] = "ACTIVE"
    available, requested = world.faults.nodes_available, resource.inputs["scalingConfig"]["desiredSize"]
    if available is not None and "NVIDIA" in resource.inputs["amiType"] and requested > available:
        resource.computed["status"] = "CREATE_FAILED"
        raise PartlyCreated(
            f"waiting for EKS Node Group ({resource.inputs['clusterName']}:{resource.id}) create: unexpected state "
            "'CREATE_FAILED'. last error: AsgInstanceLaunchFailures: Could not launch "
            "On-Demand Instances. InsufficientInstanceCapacity"
        )


def _nodes_resized(world: World, resource: Resource, inputs: Inputs) -> None:
    """Apply a changed size with the number of nodes that the request contains, and refuse bounds that exclude it.

    `resourceNodeGroupUpdate` of terraform-provider-aws (internal/service/eks/node_group.go) sends `scaling_config` only
    if it has changed, and `expandNodegroupScalingConfig` then sends all of it: the number of nodes in the state too.
    """
    _not_newer_than_the_control_plane(world, inputs)
    live, scaling = resource.inputs["scalingConfig"], inputs["scalingConfig"]
    if all(scaling[key] == live[key] for key in ("minSize", "maxSize")):
        inputs["scalingConfig"] = live
        return
    if not scaling["minSize"] <= scaling["desiredSize"] <= scaling["maxSize"]:
        raise Refused(f"InvalidParameterException: desired capacity {scaling['desiredSize']} is outside the new bounds")


def _policies_attached(world: World, arn: str) -> None:
    role = next(resource for resource in world.of_type("aws:iam/role:Role") if resource.computed["arn"] == arn)
    names = {one.inputs["policyArn"].rpartition("/")[2] for one in world.users(role, [_ATTACHMENT])}
    if "AmazonEKSWorkerNodePolicy" not in names:
        raise Refused("NodeCreationFailure: instances failed to join the cluster; no AmazonEKSWorkerNodePolicy")


def _template(world: World, inputs: Inputs) -> Resource | None:
    return world.find(_TEMPLATE, at(inputs, "launchTemplate.id") or "")


def _addon_created(world: World, inputs: Inputs) -> None:
    _addon_offered(world, inputs)
    name = inputs["addonName"]
    if name in _POD_ADDONS and not world.ready(_NODES):
        raise Refused(f"waiting for EKS Add-On {name}: unexpected state 'DEGRADED', insufficient number of replicas")


def _leave_interfaces(world: World, resource: Resource) -> None:
    """Leave network interfaces behind if the CNI add-on or its policy is deleted while nodes run."""
    is_cni = resource.inputs.get("addonName") == "vpc-cni" or "AmazonEKS_CNI_Policy" in str(
        resource.inputs.get("policyArn")
    )
    for group in world.of_type(_NODES) if is_cni else []:
        world.add(_INTERFACE, f"eni-left-by-{group.id}", {"subnetIds": group.inputs["subnetIds"]})


def _group_deleted(world: World, resource: Resource) -> None:
    """Refuse while a node group uses the security group: interfaces get the groups of the launch template."""
    for group in world.of_type(_NODES):
        template = _template(world, group.inputs)
        if template and template.refers_to(resource):
            raise Refused(f"{_DEPENDENCY}: {resource.id} has a dependent object, an interface of {group.name}")


def _placement_deleted(world: World, resource: Resource) -> None:
    for group in world.of_type(_NODES):
        template = _template(world, group.inputs)
        if template and at(template.inputs, "placement.groupName") in resource.identifiers:
            raise Refused(f"InvalidPlacementGroup.InUse: {resource.id} is used by instances of {group.name}")


def _gateway_deleted(world: World, resource: Resource) -> None:
    for gateway in world.of_type("aws:ec2/natGateway:NatGateway"):
        raise Refused(f"{_DEPENDENCY}: {resource.id} has mapped public addresses, that of {gateway.name}")


def _bucket_deleted(world: World, resource: Resource) -> None:
    objects = [one for one in world.of_type("aws:s3/bucketObjectv2:BucketObjectv2") if one.refers_to(resource)]
    if objects and not resource.inputs.get("forceDestroy"):
        raise Refused(f"BucketNotEmpty: {resource.id} has {len(objects)} objects")
    for one in objects:
        world.remove(one)


def _repository_deleted(world: World, resource: Resource) -> None:
    url = resource.computed["repositoryUrl"]
    pushed = [image for image in world.of_type("docker-build:index:Image") if url in str(image.inputs["tags"])]
    if pushed and not resource.inputs.get("forceDelete"):
        raise Refused(f"RepositoryNotEmptyException: {resource.id} has images")


def _template_computed(name: str, inputs: Inputs) -> Inputs:
    """Return outputs with a version that depends on the content."""
    return {"latestVersion": 1 + len(str(sorted(inputs.items(), key=str))), "arn": f"arn:aws:ec2:::template/{name}"}


def _entry_created(world: World, inputs: Inputs) -> None:
    """Refuse a second entry for a principal; the creator of the cluster has one from the start.

    https://github.com/terraform-aws-modules/terraform-aws-eks/issues/2968, and pulumi-eks, nodejs/eks/cluster/
    cluster.ts (bootstrapClusterCreatorAdminPermissions).
    """
    entries = [one.inputs for one in world.of_type(_ENTRY) if one.inputs["clusterName"] == inputs["clusterName"]]
    if inputs["principalArn"] in (_CREATOR, *(one["principalArn"] for one in entries)):
        raise Refused("ResourceInUseException: The specified access entry resource is already in use on this cluster.")


_POLICY_RULES = Rules(lock_key=lambda inputs: f"policies of {inputs['bucket']}")

RULES: Mapping[str, Rules] = {
    "aws:ec2/vpc:Vpc": Rules(
        ("cidrBlock",),
        _all_of(
            "aws:ec2/subnet:Subnet",
            "aws:ec2/securityGroup:SecurityGroup",
            "aws:ec2/internetGateway:InternetGateway",
            "aws:ec2/routeTable:RouteTable",
            "aws:ec2/vpcEndpoint:VpcEndpoint",
        ),
    ),
    "aws:ec2/subnet:Subnet": Rules(
        ("availabilityZone", "cidrBlock", "vpcId"),
        _all_of(
            _CLUSTER,
            _NODES,
            _INTERFACE,
            "aws:ec2/natGateway:NatGateway",
            "aws:ec2/vpcEndpoint:VpcEndpoint",
            "aws:fsx/lustreFileSystem:LustreFileSystem",
        ),
    ),
    "aws:ec2/securityGroup:SecurityGroup": Rules(
        ("description", "name", "vpcId"),
        _all_of(
            "aws:ec2/vpcEndpoint:VpcEndpoint",
            "aws:fsx/lustreFileSystem:LustreFileSystem",
            "aws:ec2/securityGroup:SecurityGroup",
        ),
        on_delete=_group_deleted,
    ),
    "aws:ec2/internetGateway:InternetGateway": Rules(("vpcId",), on_delete=_gateway_deleted),
    "aws:ec2/eip:Eip": Rules(("domain",), _all_of("aws:ec2/natGateway:NatGateway", error="InvalidIPAddress.InUse")),
    "aws:ec2/natGateway:NatGateway": Rules(("allocationId", "subnetId")),
    "aws:ec2/route:Route": Rules(("routeTableId", "destinationCidrBlock")),
    "aws:ec2/routeTable:RouteTable": Rules(("vpcId",), _all_of("aws:ec2/routeTableAssociation:RouteTableAssociation")),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": Rules(("subnetId",)),
    "aws:ec2/vpcEndpoint:VpcEndpoint": Rules(("serviceName", "vpcEndpointType", "vpcId")),
    "aws:ec2/placementGroup:PlacementGroup": Rules(("name", "strategy"), on_delete=_placement_deleted),
    _TEMPLATE: Rules(("name",), _all_of(_NODES, error="launch template in use"), computed=_template_computed),
    _CLUSTER: Rules(
        ("name", "roleArn", "encryptionConfig", "kubernetesNetworkConfig", "vpcConfig.subnetIds"),
        _all_of(_NODES, error="ResourceInUseException: Cluster has nodegroups attached"),
        on_create=_cluster_created,
        on_update=_cluster_updated,
        identity=lambda name, inputs: str(inputs["name"]),
        computed=lambda name, inputs: {"arn": f"arn:aws:eks:us-west-2:123456789012:cluster/{inputs['name']}"},
    ),
    _NODES: Rules(
        ("amiType", "capacityType", "clusterName", "instanceTypes", "launchTemplate.id", "nodeRoleArn", "subnetIds"),
        on_create=_nodes_created,
        on_created=_nodes_started,
        on_update=_nodes_resized,
    ),
    _ADDON: Rules(
        ("addonName", "clusterName"),
        on_create=_addon_created,
        on_update=lambda world, resource, inputs: _addon_offered(world, inputs),
        on_delete=_leave_interfaces,
    ),
    _ENTRY: Rules(
        ("clusterName", "principalArn"),
        on_create=_entry_created,
        identity=lambda name, inputs: f"{inputs['clusterName']}:{inputs['principalArn']}",
    ),
    "aws:eks/accessPolicyAssociation:AccessPolicyAssociation": Rules(("clusterName", "policyArn", "principalArn")),
    "aws:eks/podIdentityAssociation:PodIdentityAssociation": Rules(("clusterName", "namespace", "serviceAccount")),
    "aws:fsx/lustreFileSystem:LustreFileSystem": Rules(
        ("deploymentType", "fileSystemTypeVersion", "kmsKeyId", "securityGroupIds", "storageType", "subnetIds"),
        problems=_lustre_problems,
        replaces=_lustre_replaces,
    ),
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation": Rules(
        ("dataRepositoryPath", "fileSystemId", "fileSystemPath")
    ),
    "aws:iam/role:Role": Rules(
        ("name",),
        _all_of(_ATTACHMENT, "aws:iam/rolePolicy:RolePolicy", _NODES, _CLUSTER, error="DeleteConflict"),
        # `AutoName("name", 64, "-")` in provider/resources.go of pulumi-aws.
        max_name=64,
    ),
    _ATTACHMENT: Rules(("policyArn", "role"), on_delete=_leave_interfaces),
    "aws:iam/rolePolicy:RolePolicy": Rules(("role",)),
    "aws:kms/alias:Alias": Rules(("name",), identity=lambda name, inputs: str(inputs["name"])),
    "aws:kms/key:Key": Rules(
        (),
        _all_of(_CLUSTER, "aws:fsx/lustreFileSystem:LustreFileSystem", error="the key is in use"),
    ),
    _LOG_GROUP: Rules(("name",), identity=lambda name, inputs: str(inputs["name"]), on_deleted=_log_group_deleted),
    "aws:ecr/repository:Repository": Rules(("encryptionConfigurations", "name"), on_delete=_repository_deleted),
    "aws:s3/bucket:Bucket": Rules(("bucket",), on_delete=_bucket_deleted),
    "aws:s3/bucketPolicy:BucketPolicy": _POLICY_RULES,
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": _POLICY_RULES,
    "aws:s3/bucketObjectv2:BucketObjectv2": Rules(
        ("bucket", "key"), identity=lambda name, inputs: f"{inputs['bucket']}/{inputs['key']}"
    ),
    "aws:autoscaling/tag:Tag": Rules(
        ("autoscalingGroupName", "tag.key"),
        identity=lambda name, inputs: f"{inputs['autoscalingGroupName']},{inputs['tag']['key']}",
    ),
}


def _describe_cluster(world: World, arguments: Inputs) -> Inputs:
    plane = next(one for one in world.of_type(_CLUSTER) if one.inputs["name"] == arguments["name"])
    return {**arguments, "status": plane.status, "version": plane.inputs["version"]}


def _describe_group(world: World, arguments: Inputs) -> Inputs:
    group = next(one for one in world.of_type(_NODES) if one.physical == arguments["nodeGroupName"])
    return {**arguments, "status": group.computed.get("status"), "scalingConfigs": [group.inputs["scalingConfig"]]}


def _list_groups(world: World, arguments: Inputs) -> Inputs:
    groups = [one for one in world.of_type(_NODES) if one.inputs["clusterName"] == arguments["clusterName"]]
    return {**arguments, "names": [one.physical for one in groups]}


#: Functions that answer from the world.
CALLS: Mapping[str, Callable[[World, Inputs], Inputs]] = {
    "aws:eks/getClusters:getClusters": lambda world, arguments: {
        "names": [str(one.inputs["name"]) for one in world.of_type(_CLUSTER)]
    },
    "aws:eks/getCluster:getCluster": _describe_cluster,
    "aws:eks/getNodeGroups:getNodeGroups": lambda world, arguments: {
        **arguments,
        "names": [
            one.physical for one in world.of_type(_NODES) if one.inputs["clusterName"] == arguments["clusterName"]
        ],
    },
    "aws:eks/getNodeGroup:getNodeGroup": _describe_group,
}


def control_plane(inputs: Inputs, role_arn: str) -> Inputs:
    """Return the inputs of the `aws.eks.Cluster` inside the component of pulumi-eks."""
    return {
        "name": inputs["name"],
        "roleArn": role_arn,
        "version": inputs.get("version"),
        "vpcConfig": {
            "subnetIds": inputs["privateSubnetIds"],
            "endpointPrivateAccess": inputs.get("endpointPrivateAccess"),
            "endpointPublicAccess": inputs.get("endpointPublicAccess"),
            "publicAccessCidrs": inputs.get("publicAccessCidrs"),
        },
        "encryptionConfig": {"provider": {"keyArn": inputs["encryptionConfigKeyArn"]}, "resources": ["secrets"]},
        "tags": inputs.get("tags"),
    }


def trust_policy() -> str:
    """Return the trust policy of the control plane's role."""
    statement = {"Effect": "Allow", "Principal": {"Service": "eks.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
