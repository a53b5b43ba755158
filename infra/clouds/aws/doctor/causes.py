"""Known problems on AWS: symptom, cause and fix of each. The table in the guide is generated from this list."""

from __future__ import annotations

from infra.findings.model import Cause

CREDENTIALS = Cause(
    "aws-credentials",
    "`No valid credential sources found`, `ExpiredToken`",
    "this shell has no AWS credentials, or they have expired",
    "{login}; for a profile of another name: export AWS_PROFILE=<profile>",
    guide="aws sso login; for a profile of another name: export AWS_PROFILE=<profile>",
)
DENIED = Cause(
    "aws-denied",
    "a check ends with `AccessDenied` or `UnauthorizedOperation`",
    "the role may not read this; `up` may still have the rights to create the resources",
    "request the action that the result names from the account's owner",
)
UNREACHABLE = Cause(
    "aws-unreachable",
    "a check ends with `Could not connect to the endpoint URL`",
    "the region's name is wrong, the account has not opted in to it, or this machine has no internet access",
    "pulumi config get aws:region; aws account get-region-opt-status --region-name {region}",
)
ACCOUNT = Cause(
    "aws-account",
    "`stack ... was created in ..., and the credentials in use reach ...`",
    "another profile is active than when the stack was created",
    "switch back to account {account}: export AWS_PROFILE=<profile>, or {login}",
    guide="switch back to that account: export AWS_PROFILE=<profile>, or aws sso login",
)
ZONE = Cause(
    "aws-zone",
    "`InvalidParameterValue` at the subnets",
    "the account does not have that zone: letters differ between accounts, and some regions have no zone a or b",
    "pulumi config set --path 'network.zones[0]' {zone}, and network.zones[1] likewise",
)
EKS_ZONE = Cause(
    "aws-eks-zone",
    "`UnsupportedAvailabilityZoneException` at the cluster",
    "EKS accepts no control plane in one zone each of us-east-1, us-west-1 and ca-central-1, often us-east-1e",
    "pulumi config set --path 'network.zones[0]' {zone}, and network.zones[1] likewise",
    errors=("UnsupportedAvailabilityZoneException",),
)
FAILED_GROUP = Cause(
    "aws-failed-group",
    "a node group ended in `CREATE_FAILED`, and the next `up` reports it again",
    "the group exists without nodes, because their capacity was missing, and EKS never tries again",
    "python -m infra up --stack {stack} --replace '{urn}', with the URN that the error names",
)
OFFER = Cause(
    "aws-offer",
    "the node group fails with CREATE_FAILED and `Your requested instance type is not supported in your requested AZ`",
    "EC2 does not offer the instance type in that zone, or not in the region at all",
    "{fix}",
    guide="pulumi config set --path gpu.zone <zone>, or another region; python -m infra doctor names the zones that do",
    errors=("is not supported in your requested Availability Zone",),
)
QUOTA = Cause(
    "aws-quota",
    "the node group waits for half an hour, then fails with `VcpuLimitExceeded` or `MaxSpotInstanceCountExceeded`",
    "the account's vCPU quota for this family of types is too small: a new account has 0 for P types",
    "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} --desired-value {value}"
    " --region {region} (P types take days), or fewer nodes: pulumi config set --path gpu.nodes.max {nodes}",
    errors=("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"),
)
NETWORK_QUOTA = Cause(
    "aws-network-quota",
    "`VpcLimitExceeded` or `AddressLimitExceeded`",
    "the account has used its quota of VPCs or addresses in the region",
    "aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code}"
    " --desired-value {value} --region {region}, or delete an unused one",
    errors=("VpcLimitExceeded", "AddressLimitExceeded"),
)
CAPACITY = Cause(
    "aws-capacity",
    "`InsufficientInstanceCapacity` although the quota is large enough",
    "no such machine is free in the zone at present; a quota does not guarantee capacity",
    "another zone (gpu.zone), a reservation (gpu.capacity reservation) or a capacity block (capacity_block)",
    errors=("InsufficientInstanceCapacity",),
)
RESERVATION = Cause(
    "aws-reservation",
    "`InsufficientInstanceCapacity`, or `InvalidCapacityReservationId`, with gpu.reservation_id set",
    "the reservation has expired, has not started, is full, or is for another type or zone",
    "{fix}",
    guide="aws ec2 describe-capacity-reservations, then set gpu.zone, gpu.instance_type and gpu.nodes.desired to match",
    errors=("InvalidCapacityReservationId",),
)
BUCKET = Cause(
    "aws-bucket",
    "the trainer exits with `AccessDenied` or `NoSuchBucket`",
    "the bucket was deleted or belongs to another account",
    "aws s3api head-bucket --bucket {bucket}; recreate it: python -m infra refresh --stack {stack}, then up",
)
OVERLAP = Cause(
    "aws-overlap",
    "a peering between the VPCs is rejected, or traffic does not arrive",
    "another VPC of the region overlaps network.cidr; that is harmless until the two are connected",
    "before the first `up`: pulumi config set --path network.cidr {free}",
)
EFA = Cause(
    "aws-efa",
    "netcheck fails, or NCCL logs `NET/Socket`",
    "the image lacks the EFA libraries, or the job does not request vpc.amazonaws.com/efa",
    "let the stack build the image (pulumi config rm --path job.image), or build yours with --target aws",
)
LOG_GROUP = Cause(
    "aws-log-group",
    "`ResourceAlreadyExistsException: The specified log group already exists` at the cluster's logs",
    "after a destroy EKS writes the cluster's last logs and so creates the log group again",
    "python -m infra orphans --stack <stack>, run the command that it prints for the log group, then up",
    errors=("The specified log group already exists",),
)
DRAIN = Cause(
    "aws-drain",
    "an update of a node group ends with `PodEvictionFailure`",
    "a pod did not leave its node within 15 minutes: a disruption budget, or a save that takes longer",
    "python -m workloads stop --stack <stack>, then: python -m infra up --stack <stack>, then: python -m workloads"
    " resume --stack <stack>",
    errors=("PodEvictionFailure",),
)
CREATOR = Cause(
    "aws-creator",
    "`ResourceInUseException: The specified access entry resource is already in use on this cluster`",
    "a principal of cluster.admin_role_arns created the cluster, which made it an administrator",
    "pulumi config rm --path 'cluster.admin_role_arns[<number>]', with the number of that principal, then up",
    errors=("The specified access entry resource is already in use",),
)
EXISTING_NETWORK = Cause(
    "aws-existing-network",
    "nodes of a stack with `network.existing` never join the cluster",
    "the VPC has no DNS names, or the subnets have no NAT route or too few addresses",
    "{fix}",
    guide="the result names the command for each: DNS of the VPC, a NAT route, a larger subnet",
)
CAUSES = (
    CREDENTIALS, ACCOUNT, DENIED, UNREACHABLE, ZONE, EKS_ZONE, OFFER, QUOTA, CAPACITY, FAILED_GROUP, RESERVATION,
    NETWORK_QUOTA, OVERLAP, EXISTING_NETWORK, BUCKET, EFA, LOG_GROUP, DRAIN, CREATOR,
)  # fmt: skip
