"""The account that the credentials belong to, and the messages with which AWS rejects them."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi

from infra.clouds.aws.settings import Settings

ASKS = True
LOGIN = "aws sso login"

#: https://docs.aws.amazon.com/STS/latest/APIReference/CommonErrors.html, and messages of the SDK.
REFUSED: Sequence[str] = (
    "ExpiredToken",
    "RequestExpired",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "Token has expired and refresh failed",
    "SSO session has expired",
    "failed to refresh cached credentials",
    "No valid credential sources found",
    "no EC2 IMDS role found",
    "Unable to locate credentials",
)


def account(settings: Settings) -> pulumi.Output[str]:
    """Return the account's number as STS reports it, because a profile or a role may belong to any account."""
    import pulumi_aws as aws  # imported late: it takes seconds, and reading the settings does not need it

    del settings
    return aws.get_caller_identity_output().account_id
