"""Searches of EKS, Auto Scaling, FSx, CloudWatch Logs, IAM, KMS, ECR, S3, and what only the tagging API lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra.clouds.aws.orphans.owner import HOURS_PER_MONTH, Owner, read_tags, utc
from infra.findings.orphans import Leftover, Search, shell

#: Groups that EKS and the CloudWatch agent write to; both create a group again that was deleted too early.
_LOG_PREFIXES = ("/aws/eks/", "/aws/containerinsights/")
_PENDING_DELETION = "PendingDeletion"


def machines(owner: Owner) -> list[Search]:
    """Return the searches of what starts machines: groups, and the cluster."""
    return [
        Search("Auto Scaling group", lambda: _scaling_groups(owner)),
        Search("node group", lambda: _node_groups(owner)),
        Search("cluster", lambda: _clusters(owner), finds_clusters=True),
    ]


def data(owner: Owner) -> list[Search]:
    """Return the searches of data, logs, rights and keys."""
    return [
        Search("file system", lambda: _file_systems(owner)),
        Search("file system backup", lambda: _backups(owner)),
        Search("log group", lambda: _log_groups(owner)),
        Search("image repository", lambda: _repositories(owner)),
        Search("IAM role", lambda: _roles(owner)),
        Search("placement group", lambda: _placement_groups(owner)),
        Search("KMS key", lambda: _keys(owner)),
        Search("bucket", lambda: _buckets(owner)),
    ]


def _scaling_groups(owner: Owner) -> Iterator[Leftover]:
    filters = [{"Name": "tag:eks:cluster-name", "Values": owner.cluster_patterns}]
    for item in owner.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", Filters=filters):
        if owner.owns(read_tags(item.get("Tags"))):
            name = str(item["AutoScalingGroupName"])
            template = (
                "aws autoscaling delete-auto-scaling-group --auto-scaling-group-name {name} "
                "--force-delete --region {region}"
            )
            remove = shell(template, name=name, region=owner.region)
            yield Leftover("Auto Scaling group", name, remove, utc(item.get("CreatedTime")), of_cluster=True)


def _cluster_names(owner: Owner) -> Iterator[str]:
    """Yield the stack's clusters: by the tags, because a name alone may be another stack's."""
    for name in owner.pages("eks", "list_clusters", "clusters"):
        if owner.is_cluster(name) and owner.has_tags(_cluster(owner, name).get("tags") or {}):
            yield name


def _cluster(owner: Owner, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = owner.clients("eks").describe_cluster(name=name)["cluster"]
    return found


def _node_groups(owner: Owner) -> Iterator[Leftover]:
    for cluster in _cluster_names(owner):
        for name in owner.pages("eks", "list_nodegroups", "nodegroups", clusterName=cluster):
            template = "--cluster-name {cluster} --nodegroup-name {name} --region {region}"
            target = shell(template, cluster=cluster, name=name, region=owner.region)
            remove = f"aws eks delete-nodegroup {target} && aws eks wait nodegroup-deleted {target}"
            group = owner.clients("eks").describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
            aliases = (str(group["nodegroupArn"]), f"{cluster}:{name}")
            yield Leftover("node group", name, remove, utc(group.get("createdAt")), aliases=aliases)


def _clusters(owner: Owner) -> Iterator[Leftover]:
    price = owner.prices["control_plane"]["standard"]
    for name in _cluster_names(owner):
        found = _cluster(owner, name)
        target = shell("--name {name} --region {region}", name=name, region=owner.region)
        remove = f"aws eks delete-cluster {target} && aws eks wait cluster-deleted {target}"
        since, aliases = utc(found.get("createdAt")), (str(found["arn"]),)
        yield Leftover("cluster", name, remove, since, price, aliases=aliases, live="cluster")


def _file_systems(owner: Owner) -> Iterator[Leftover]:
    for item in owner.pages("fsx", "describe_file_systems", "FileSystems"):
        if owner.has_tags(read_tags(item.get("Tags"))):
            name = str(item["FileSystemId"])
            remove = shell(
                "aws fsx delete-file-system --file-system-id {name} --region {region}", name=name, region=owner.region
            )
            since, price = utc(item.get("CreationTime")), _lustre_price(owner, item)
            yield Leftover("file system", name, remove, since, price, aliases=(str(item["ResourceARN"]),))


def _lustre_price(owner: Owner, item: Mapping[str, Any]) -> float | None:
    """Return the price of a file system, None for a throughput without a known one."""
    throughput = (item.get("LustreConfiguration") or {}).get("PerUnitStorageThroughput")
    usd_per_gib = owner.prices["lustre"].get(str(throughput))
    return None if usd_per_gib is None else int(item["StorageCapacity"]) * usd_per_gib / HOURS_PER_MONTH


def _backups(owner: Owner) -> Iterator[Leftover]:
    for item in owner.pages("fsx", "describe_backups", "Backups"):
        tags = read_tags(item.get("Tags")) | read_tags((item.get("FileSystem") or {}).get("Tags"))
        if owner.has_tags(tags):
            name = str(item["BackupId"])
            remove = shell("aws fsx delete-backup --backup-id {name} --region {region}", name=name, region=owner.region)
            yield Leftover("file system backup", name, remove, utc(item.get("CreationTime")))


def _log_groups(owner: Owner) -> Iterator[Leftover]:
    """Yield the log groups of the cluster; those that EKS creates itself have no tags."""
    for prefix in _LOG_PREFIXES:
        listed = owner.pages("logs", "describe_log_groups", "logGroups", logGroupNamePrefix=prefix + owner.cluster)
        for item in listed:
            name = str(item["logGroupName"])
            if owner.is_cluster(name.removeprefix(prefix).partition("/")[0]):
                remove = shell(
                    "aws logs delete-log-group --log-group-name {name} --region {region}",
                    name=name,
                    region=owner.region,
                )
                yield Leftover("log group", name, remove, utc(item.get("creationTime")), of_cluster=True)


def _roles(owner: Owner) -> Iterator[Leftover]:
    """Yield the roles that Pulumi named after the stack; the tagging API does not list roles."""
    iam = owner.clients("iam")
    for item in owner.pages("iam", "list_roles", "Roles"):
        name = str(item["RoleName"])
        if name.startswith(f"{owner.settings.stack}-"):
            tags = owner.pages("iam", "list_role_tags", "Tags", RoleName=name)
            if owner.has_tags(read_tags(list(tags))):
                steps = [
                    shell(
                        "aws iam detach-role-policy --role-name {name} --policy-arn {arn}",
                        name=name,
                        arn=one["PolicyArn"],
                    )
                    for one in owner.pages("iam", "list_attached_role_policies", "AttachedPolicies", RoleName=name)
                ]
                steps += [
                    shell("aws iam delete-role-policy --role-name {name} --policy-name {one}", name=name, one=one)
                    for one in iam.list_role_policies(RoleName=name)["PolicyNames"]
                ]
                remove = " && ".join([*steps, shell("aws iam delete-role --role-name {name}", name=name)])
                yield Leftover("IAM role", name, remove, utc(item.get("CreateDate")), aliases=(str(item["Arn"]),))


def _tagged(owner: Owner, kind: str) -> Iterator[str]:
    """Yield the ARNs of one kind with the stack's tags, for a while also of what was deleted."""
    filters = [{"Key": key, "Values": [value]} for key, value in owner.tags.items()]
    listed = owner.pages(
        "resourcegroupstaggingapi",
        "get_resources",
        "ResourceTagMappingList",
        TagFilters=filters,
        ResourceTypeFilters=[kind],
    )
    for item in listed:
        yield str(item["ResourceARN"])


def _repositories(owner: Owner) -> Iterator[Leftover]:
    ecr = owner.clients("ecr")
    for item in owner.pages("ecr", "describe_repositories", "repositories"):
        name, arn = str(item["repositoryName"]), str(item["repositoryArn"])
        if not name.startswith(f"{owner.settings.stack}-"):
            continue
        if owner.has_tags(read_tags(ecr.list_tags_for_resource(resourceArn=arn)["tags"])):
            remove = shell(
                "aws ecr delete-repository --repository-name {name} --force --region {region}",
                name=name,
                region=owner.region,
            )
            yield Leftover("image repository", name, remove, utc(item.get("createdAt")), aliases=(arn,))


def _placement_groups(owner: Owner) -> Iterator[Leftover]:
    for arn in _tagged(owner, "ec2:placement-group"):
        name = arn.partition(":placement-group/")[2]
        remove = shell(
            "aws ec2 delete-placement-group --group-name {name} --region {region}", name=name, region=owner.region
        )
        yield Leftover("placement group", name, remove, aliases=(arn,))


def _keys(owner: Owner) -> Iterator[Leftover]:
    """Yield the keys; a key that is being deleted is not billed and goes by itself."""
    kms = owner.clients("kms")
    for arn in _tagged(owner, "kms:key"):
        try:
            key = kms.describe_key(KeyId=arn)["KeyMetadata"]
        except kms.exceptions.NotFoundException:
            continue
        name, since = str(key["KeyId"]), utc(key.get("CreationDate"))
        remove = shell(
            "aws kms schedule-key-deletion --key-id {name} --pending-window-in-days 7 --region {region}",
            name=name,
            region=owner.region,
        )
        if key["KeyState"] == _PENDING_DELETION:
            reason = f"AWS deletes it at {utc(key.get('DeletionDate'))}, without charge until then"
            yield Leftover("KMS key", name, remove, since, kept=reason, aliases=(arn,))
        else:
            price = owner.prices["key"]["kms"] / HOURS_PER_MONTH
            yield Leftover("KMS key", name, remove, since, price, aliases=(arn,))


def _buckets(owner: Owner) -> Iterator[Leftover]:
    """Yield the buckets, which `storage.on_destroy keep` keeps with their checkpoints."""
    created = {str(item["Name"]): item.get("CreationDate") for item in owner.clients("s3").list_buckets()["Buckets"]}
    keep = "storage.on_destroy is keep" if owner.settings.storage.on_destroy == "keep" else ""
    for arn in _tagged(owner, "s3"):
        name = arn.rpartition(":")[2]
        if name in created:
            # `aws s3 rb --force` leaves the old versions, with which S3 refuses to delete the bucket.
            empty = f"import boto3; boto3.resource('s3').Bucket({name!r}).object_versions.delete()"
            template = "python -c {empty} && aws s3 rb {uri} --region {region}"
            remove = shell(template, empty=empty.replace("'", '"'), uri=f"s3://{name}", region=owner.region)
            yield Leftover("bucket", name, remove, utc(created[name]), kept=keep, aliases=(arn,), live="bucket")
