"""The container registry of the trainer image, and the roles to push and pull."""

from __future__ import annotations

from collections.abc import Sequence

import pulumi
from pulumi_azure_native import authorization, containerregistry

from infra.clouds.azure import registry_token
from infra.clouds.azure.identity import Principals, Role, grant
from infra.clouds.azure.network import EndpointNetwork, address_or_range, private_endpoint
from infra.clouds.azure.settings import Settings, physical_name
from infra.contract import Login, Registry

_REPOSITORY = "trainer"


class ContainerRegistry(pulumi.ComponentResource):
    """A registry without passwords: nodes pull with their identity, `up` and users push with theirs."""

    facts: Registry
    registry_id: pulumi.Output[str]
    login: pulumi.Output[str]
    ready: tuple[pulumi.Resource, ...]

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: EndpointNetwork,
        principals: Principals,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the registry, its private endpoint and its roles."""
        super().__init__("torchrec-cloud:azure:Registry", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        registry = _create_registry(name, settings, network, child)
        address = private_endpoint(name, network, registry.id, "registry", settings.labels, child)
        pull = grant(f"{name}-pull", Role.ACR_PULL, registry.id, principals.kubelet_id, "ServicePrincipal", child)
        push = [
            grant(f"{name}-push-{who}", Role.ACR_PUSH, registry.id, principal, kind, child)
            for who, (principal, kind) in principals.administrators.items()
        ]
        self.facts = Registry(
            repository=pulumi.Output.concat(registry.login_server, f"/{_REPOSITORY}"),
            server=registry.login_server,
            login=lambda: self._login(registry, [address, *push]),
        )
        self.registry_id = registry.id
        self.login = pulumi.Output.concat("az acr login --name ", registry.name)
        self.ready = (address, pull)
        self.register_outputs({"server": registry.login_server})

    def _login(self, registry: containerregistry.Registry, after: Sequence[pulumi.Resource]) -> Login:
        """Return a token of three hours for the provider's own principal; a preview pushes nothing and needs none."""
        if pulumi.runtime.is_dry_run():
            return Login(registry_token.USER, pulumi.Output.secret(""))
        entra = authorization.get_client_token_output(opts=pulumi.InvokeOutputOptions(parent=self, depends_on=after))
        known: pulumi.Output[list[str]] = pulumi.Output.all(registry.login_server, entra.token)
        password: pulumi.Output[str] = known.apply(self._push_token)
        return Login(registry_token.USER, pulumi.Output.secret(password))

    async def _push_token(self, known: Sequence[str]) -> str:
        """Return the token, or an empty one with a warning: `up` needs none if the image is unchanged."""
        server, entra_token = known
        pulumi.log.info(f"waiting for permission to push to {server}", self, ephemeral=True)
        try:
            return await registry_token.push_token(server, _REPOSITORY, entra_token)
        except registry_token.PushError as error:
            fix = (
                "assign the role AcrPush to the account of `pulumi up`, and add its address to network.authorized_cidrs"
                if error.status
                else "run `pulumi up` where the registry is reachable, as `az acr check-health` shows"
            )
            pulumi.log.warn(f"no login to {server}, so an image cannot be pushed: got {error}. Fix: {fix}", self)
            return ""


def _create_registry(
    name: str, settings: Settings, network: EndpointNetwork, opts: pulumi.ResourceOptions
) -> containerregistry.Registry:
    """Create a Premium registry: only this tier has private endpoints and IP rules."""
    authorized = settings.network.authorized_cidrs
    rules = [
        containerregistry.IPRuleArgs(i_p_address_or_range=address_or_range(cidr), action="Allow") for cidr in authorized
    ]
    return containerregistry.Registry(
        f"{name}-acr",
        registry_name=network.resource_group.id.apply(
            lambda group: physical_name(settings.stack, group, max_length=50)
        ),
        resource_group_name=network.resource_group.name,
        sku=containerregistry.SkuArgs(name="Premium"),
        admin_user_enabled=False,
        anonymous_pull_enabled=False,
        public_network_access="Enabled" if authorized else "Disabled",
        network_rule_set=containerregistry.NetworkRuleSetArgs(default_action="Deny", ip_rules=rules),
        tags=settings.labels,
        opts=opts,
    )
