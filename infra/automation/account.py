"""Checks that the credentials belong to the account that the stack is in."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pulumi
from pulumi.automation import ConfigMap, LocalWorkspaceOptions, PulumiCommand, create_stack

from infra import stack
from infra.automation.errors import OperationError


def find_account(configured: stack.Stack, provider_config: ConfigMap, engine: PulumiCommand) -> str:
    """Return the account of the current credentials, or raise CommandError if the cloud rejects them."""
    cloud, settings = configured.cloud, configured.settings
    if cloud.asks_for_account:
        return _query_provider(configured, provider_config, engine)
    found = cloud.account(settings)
    assert isinstance(found, str), f"{cloud.name} declares that it finds the account without the provider"
    return found


def mismatch(stack_name: str, verb: str, stack_account: str, account: str, login: str) -> OperationError:
    """Return the error for credentials of another account than the stack's."""
    return OperationError(
        f"stack {stack_name!r} was created in {stack_account}, and the credentials in use reach {account}\n"
        f"  switch back to {stack_account} ({login}), then: python -m infra {verb} --stack {stack_name}\n"
        f"  if {stack_account} was renamed to {account}: pulumi {verb} --stack {stack_name} does not compare them"
    )


def _query_provider(configured: stack.Stack, provider_config: ConfigMap, engine: PulumiCommand) -> str:
    """Query the account through the cloud's provider, which finds the credentials as it does for the stack.

    The query is a preview of a temporary stack, so that the stack's own state and its lock are not used.
    """
    found: list[str] = []

    def program() -> None:
        pulumi.Output.from_input(configured.cloud.account(configured.settings)).apply(found.append)

    with tempfile.TemporaryDirectory(prefix="torchrec-cloud-") as folder:
        states = Path(folder) / "states"
        states.mkdir()
        environment = {"PULUMI_BACKEND_URL": states.as_uri(), "PULUMI_CONFIG_PASSPHRASE": "account"}
        options = LocalWorkspaceOptions(work_dir=folder, env_vars=environment, pulumi_command=engine)
        temporary = create_stack("account", project_name=configured.settings.project, program=program, opts=options)
        temporary.set_all_config(provider_config)
        temporary.preview()
    assert found, "a preview runs every function call of a provider"
    return found[0]
