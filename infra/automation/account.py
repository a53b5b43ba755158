"""Whether the credentials in use belong where the stack is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pulumi
from pulumi.automation import ConfigMap, LocalWorkspaceOptions, PulumiCommand, create_stack

from infra import stack
from infra.automation.errors import OperationError


def current(configured: stack.Stack, provider_config: ConfigMap, engine: PulumiCommand) -> str:
    """The account that the credentials in use reach; CommandError where the cloud refuses them."""
    cloud, settings = configured.cloud, configured.settings
    if cloud.asks_for_account:
        return _asked(configured, provider_config, engine)
    found = cloud.account(settings)
    assert isinstance(found, str), f"{cloud.name} says it asks nobody"
    return found


def differs(stack_name: str, verb: str, before: str, now: str, login: str) -> OperationError:
    """The refusal to work on one account's stack with another's credentials."""
    return OperationError(
        f"stack {stack_name!r} was created in {before}, and the credentials in use reach {now}\n"
        f"  switch back to {before} ({login}), then: python -m infra {verb} --stack {stack_name}\n"
        f"  if {before} is now called {now}: pulumi {verb} --stack {stack_name} does not compare them"
    )


def _asked(configured: stack.Stack, provider_config: ConfigMap, engine: PulumiCommand) -> str:
    """Asked through the cloud's provider in a program of one call: the same credentials are found in the same order.

    Its state is thrown away, so that neither the stack nor its lock is touched.
    """
    found: list[str] = []

    def program() -> None:
        pulumi.Output.from_input(configured.cloud.account(configured.settings)).apply(found.append)

    with tempfile.TemporaryDirectory(prefix="torchrec-cloud-") as folder:
        states = Path(folder) / "states"
        states.mkdir()
        environment = {"PULUMI_BACKEND_URL": states.as_uri(), "PULUMI_CONFIG_PASSPHRASE": "account"}
        options = LocalWorkspaceOptions(work_dir=folder, env_vars=environment, pulumi_command=engine)
        asking = create_stack("account", project_name=configured.settings.project, program=program, opts=options)
        asking.set_all_config(provider_config)
        asking.preview()
    assert found, "a preview answers every call"
    return found[0]
