"""The Artifact Registry repository of the trainer image, which nodes may only pull from."""

from __future__ import annotations

import pulumi
import pulumi_gcp as gcp

from infra.clouds.gcp.settings import Settings
from infra.contract import Login, Registry

_NUM_IMAGES_KEPT = 30
_RETENTION_DAYS = 30


class ImageRegistry(pulumi.ComponentResource):
    """One Artifact Registry repository, deleted with its images, which can be rebuilt from the sources.

    `facts` are for the contract, `server` is the host of the repository's path, `reader` lets nodes pull.
    """

    facts: Registry
    server: str
    reader: gcp.artifactregistry.RepositoryIamMember

    def __init__(
        self,
        name: str,
        settings: Settings,
        node_account: gcp.serviceaccount.Account,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Create the repository and let the nodes pull from it."""
        super().__init__("torchrec-cloud:gcp:Registry", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        repository = gcp.artifactregistry.Repository(
            f"{name}-trainer",
            location=settings.region,
            repository_id=f"{settings.project}-{settings.stack}",
            format="DOCKER",
            cleanup_policies=_cleanup_policies(),
            labels=settings.labels,
            opts=child,
        )
        self.reader = gcp.artifactregistry.RepositoryIamMember(
            f"{name}-reader",
            location=repository.location,
            repository=repository.name,
            role="roles/artifactregistry.reader",
            member=node_account.member,
            opts=child,
        )
        self.server = f"{settings.region}-docker.pkg.dev"
        path = pulumi.Output.concat(self.server, "/", settings.gcp_project, "/", repository.repository_id, "/trainer")
        self.facts = Registry(repository=path, server=self.server, login=self._login)
        self.register_outputs({"repository": path})

    def _login(self) -> Login:
        """Return a token valid for one hour, which each `pulumi up` fetches; no long-lived credential is stored."""
        token = gcp.organizations.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self)).access_token
        return Login("oauth2accesstoken", pulumi.Output.secret(token))


def _cleanup_policies() -> list[gcp.artifactregistry.RepositoryCleanupPolicyArgs]:
    """Delete old images except the newest ones: keep policies take precedence."""
    return [
        gcp.artifactregistry.RepositoryCleanupPolicyArgs(
            id="delete-old",
            action="DELETE",
            condition=gcp.artifactregistry.RepositoryCleanupPolicyConditionArgs(
                tag_state="ANY", older_than=f"{_RETENTION_DAYS * 86400}s"
            ),
        ),
        gcp.artifactregistry.RepositoryCleanupPolicyArgs(
            id="keep-newest",
            action="KEEP",
            most_recent_versions=gcp.artifactregistry.RepositoryCleanupPolicyMostRecentVersionsArgs(
                keep_count=_NUM_IMAGES_KEPT
            ),
        ),
    ]
