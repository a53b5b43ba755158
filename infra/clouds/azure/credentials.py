"""The subscription of the credentials in use, and the messages with which Azure rejects credentials."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi

from infra.clouds.azure.settings import Settings

ASKS = True
LOGIN = "az login"

#: https://learn.microsoft.com/entra/identity-platform/reference-error-codes, and the messages of the Azure CLI.
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
    """Return the id of the subscription that the provider uses."""
    from pulumi_azure_native import authorization  # loading the SDK takes seconds

    del settings
    return authorization.get_client_config_output().subscription_id
