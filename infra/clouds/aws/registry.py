"""The registry of the trainer image; nodes pull from it with their IAM role."""

from __future__ import annotations

import json

import pulumi
import pulumi_aws as aws

from infra.clouds.aws.settings import Settings
from infra.contract import Login, Registry

_NUM_IMAGES_KEPT = 30


class ImageRegistry(pulumi.ComponentResource):
    """One ECR repository with a scan of every push and expiry of old images.

    Tags are mutable, and pods name the digest. A tag names the sources, and two builds of the same sources have
    different digests: an immutable tag would refuse the build after a return to older sources, and after an `up` that
    was interrupted between the push and the state.
    `force_delete` empties it on destroy: AWS does not delete a repository with images, and images can be rebuilt.
    `facts` are for the contract, `server` is the registry's host.
    """

    facts: Registry
    server: pulumi.Output[str]

    def __init__(self, name: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("torchrec-cloud:aws:Registry", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        repository = aws.ecr.Repository(
            f"{name}-trainer",
            image_tag_mutability="MUTABLE",
            image_scanning_configuration=aws.ecr.RepositoryImageScanningConfigurationArgs(scan_on_push=True),
            encryption_configurations=[aws.ecr.RepositoryEncryptionConfigurationArgs(encryption_type="AES256")],
            force_delete=True,
            tags=settings.labels,
            opts=child,
        )
        aws.ecr.LifecyclePolicy(f"{name}-lifecycle", repository=repository.name, policy=_lifecycle_policy(), opts=child)
        self.server = repository.repository_url.apply(lambda url: url.partition("/")[0])
        self.facts = Registry(
            repository=repository.repository_url, server=self.server, login=lambda: self._login(repository)
        )
        self.register_outputs({"repository": repository.repository_url})

    def _login(self, repository: aws.ecr.Repository) -> Login:
        """Return a token valid for twelve hours, which each `pulumi up` fetches; no long-lived credential is stored."""
        token = aws.ecr.get_authorization_token_output(
            registry_id=repository.registry_id, opts=pulumi.InvokeOutputOptions(parent=self)
        )
        return Login(token.user_name, pulumi.Output.secret(token.password))


def _lifecycle_policy() -> str:
    """Return a policy that keeps only the newest images, because ECR bills every stored layer."""
    rule = {
        "rulePriority": 1,
        "description": f"keep the newest {_NUM_IMAGES_KEPT} images",
        "selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": _NUM_IMAGES_KEPT},
        "action": {"type": "expire"},
    }
    return json.dumps({"rules": [rule]}, sort_keys=True)
