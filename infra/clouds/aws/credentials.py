"""Whose account the credentials reach, and what AWS says when it refuses them."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi

from infra.clouds.aws.settings import Settings

ASKS = True
LOGIN = "aws sso login"

#: https://docs.aws.amazon.com/STS/latest/APIReference/CommonErrors.html, and the SDK's own words before it asks.
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
    """The number of the account, asked of STS: a profile or a role may lead anywhere."""
    import pulumi_aws as aws  # the settings and the lines above are read without the SDK, which takes seconds

    del settings
    return aws.get_caller_identity_output().account_id
