"""Whose subscription the credentials reach, and what Azure says when it refuses them."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi

from infra.clouds.azure.settings import Settings

ASKS = True
LOGIN = "az login"

#: https://learn.microsoft.com/entra/identity-platform/reference-error-codes, and the words of the command line.
REFUSED: Sequence[str] = (
    "AADSTS70043",
    "AADSTS700082",
    "AADSTS50173",
    "AADSTS7000222",
    "AADSTS50078",
    "ExpiredAuthenticationToken",
    "InvalidAuthenticationToken",
    "Please run 'az login'",
    "could not get token from Azure CLI",
    "building auth config",
    "unable to build authorizer",
)


def account(settings: Settings) -> pulumi.Output[str]:
    """The subscription's id, as the provider found it."""
    from pulumi_azure_native import authorization  # the lines above are read without the SDK, which takes seconds

    del settings
    return authorization.get_client_config_output().subscription_id
