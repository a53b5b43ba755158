"""Where the trainer image is pushed; nodes may pull from it and do nothing else."""

from __future__ import annotations

import pulumi
import pulumi_gcp as gcp

from infra.clouds.gcp.settings import Settings
from infra.contract import Registry

_NUM_IMAGES_KEPT = 30
_DAYS_KEPT = 30


class ImageRegistry(pulumi.ComponentResource):
    """One Artifact Registry repository, deleted with its images: they are built again from the sources.

    `facts` are for the contract, `server` is the host in front of the repository's path, `reader` lets nodes pull.
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
        super().__init__("torchrec-cloud:gcp:Registry", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        repository = gcp.artifactregistry.Repository(
            f"{name}-trainer",
            location=settings.region,
            repository_id=f"{settings.project}-{settings.stack}",
            format="DOCKER",
            cleanup_policies=_cleanup(),
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
        # A token of one hour, fetched anew by every `pulumi up`; nothing long-lived is stored.
        token = gcp.organizations.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self)).access_token
        path = pulumi.Output.concat(self.server, "/", settings.gcp_project, "/", repository.repository_id, "/trainer")
        self.facts = Registry(
            repository=path, server=self.server, username="oauth2accesstoken", password=pulumi.Output.secret(token)
        )
        self.register_outputs({"repository": path})


def _cleanup() -> list[gcp.artifactregistry.RepositoryCleanupPolicyArgs]:
    """Old images go, except the newest ones, which win over the rule that deletes."""
    return [
        gcp.artifactregistry.RepositoryCleanupPolicyArgs(
            id="delete-old",
            action="DELETE",
            condition=gcp.artifactregistry.RepositoryCleanupPolicyConditionArgs(
                tag_state="ANY", older_than=f"{_DAYS_KEPT * 86400}s"
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
