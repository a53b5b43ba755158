"""What goes wrong on AWS: how it looks, why, and the cure. The guide's table is written from this list."""

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
    "the role may not ask this; `up` may still be allowed to make what it needs",
    "ask the account's owner for the action that the result names",
)
UNREACHABLE = Cause(
    "aws-unreachable",
    "a check ends with `Could not connect to the endpoint URL`",
    "the region's name is wrong, the account has not opted in to it, or no way leads out of this machine",
    "pulumi config get aws:region; aws account get-region-opt-status --region-name {region}",
)
ACCOUNT = Cause(
    "aws-account",
    "`stack ... was created in ..., and the credentials in use reach ...`",
    "another profile is active than when the stack was made",
    "switch back to account {account}: export AWS_PROFILE=<profile>, or {login}",
    guide="switch back to that account: export AWS_PROFILE=<profile>, or aws sso login",
)
ZONE = Cause(
    "aws-zone",
    "`InvalidParameterValue` at the subnets",
    "the account does not have that zone: letters differ between accounts, and some regions lack an a or a b",
    "pulumi config set --path 'network.zones[0]' {zone}, and network.zones[1] likewise",
)
OFFER = Cause(
    "aws-offer",
    "the node group ends in CREATE_FAILED with `Your requested instance type is not supported in your requested AZ`",
    "EC2 does not offer the instance type in that zone, or nowhere in the region",
    "{mend}",
    guide="pulumi config set --path gpu.zone <zone>, or another region; python -m infra doctor names the zones that do",
)
QUOTA = Cause(
    "aws-quota",
    "the node group waits for half an hour, then `VcpuLimitExceeded` or `MaxSpotInstanceCountExceeded`",
    "the account's quota of vCPUs for this family of types is too small: for P types a new account has 0",
    "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} --desired-value {value}"
    " --region {region} (P types take days), or fewer nodes: pulumi config set --path gpu.nodes.max {nodes}",
)
NETWORK_QUOTA = Cause(
    "aws-network-quota",
    "`VpcLimitExceeded` or `AddressLimitExceeded`",
    "the region holds as many VPCs or addresses as the account may have",
    "aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code}"
    " --desired-value {value} --region {region}, or delete one that nobody uses",
)
CAPACITY = Cause(
    "aws-capacity",
    "`InsufficientInstanceCapacity` although the quota is large enough",
    "no such machine is free in the zone at present; a quota is a permission and no promise",
    "another zone (gpu.zone), a reservation (gpu.capacity reservation) or a capacity block (capacity_block)",
)
RESERVATION = Cause(
    "aws-reservation",
    "`InsufficientInstanceCapacity`, or `InvalidCapacityReservationId`, with gpu.reservation_id set",
    "the reservation is over, not begun, full, of another type or in another zone",
    "{mend}",
    guide="aws ec2 describe-capacity-reservations, then gpu.zone, gpu.instance_type and gpu.nodes.desired as it says",
)
BUCKET = Cause(
    "aws-bucket",
    "the trainer ends with `AccessDenied` or `NoSuchBucket`",
    "the bucket is gone or belongs to another account",
    "aws s3api head-bucket --bucket {bucket}; bring it back: python -m infra refresh --stack {stack}, then up",
)
OVERLAP = Cause(
    "aws-overlap",
    "a peering between the VPCs is refused, or traffic goes nowhere",
    "another VPC of the region has addresses of network.cidr; that is no mistake until the two are connected",
    "before the first `up`: pulumi config set --path network.cidr {free}",
)
EFA = Cause(
    "aws-efa",
    "netcheck fails, or NCCL's log says `NET/Socket`",
    "the image lacks the EFA libraries, or the job asks for no vpc.amazonaws.com/efa",
    "leave the image to the stack (pulumi config rm --path job.image), or build yours with --target aws",
)
CAUSES = (
    CREDENTIALS, ACCOUNT, DENIED, UNREACHABLE, ZONE, OFFER, QUOTA, CAPACITY, RESERVATION, NETWORK_QUOTA, OVERLAP,
    BUCKET, EFA,
)  # fmt: skip
