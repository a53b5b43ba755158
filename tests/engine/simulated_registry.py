"""Simulated BuildKit and registries: what builds an image again, who may push, and immutable tags."""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from weakref import WeakKeyDictionary

import loopback
from engine_world import Inputs, Refused, Resource, Rules, World

IMAGE = "docker-build:index:Image"
REPOSITORY = "aws:ecr/repository:Repository"

#: How the password of each registry begins; the simulated functions and `_AzureLogin` issue such tokens.
_PASSWORDS = {".amazonaws.com": "ecr-password-", "-docker.pkg.dev": "ya29.token-", "127.0.0.1": "acr-refresh-"}


@dataclass
class _Builder:
    """What BuildKit and the registries of one world know."""

    project: Path = Path()
    contexts: dict[str, str] = field(default_factory=dict)
    pushed: set[tuple[str, str]] = field(default_factory=set)


_BUILDERS: WeakKeyDictionary[World, _Builder] = WeakKeyDictionary()


def builder(world: World) -> _Builder:
    """Return the builder of a world; `project` is the folder in which the engine starts the provider."""
    return _BUILDERS.setdefault(world, _Builder())


def _computed(name: str, inputs: Inputs) -> Inputs:
    """Return the digest of a build with these inputs, and the reference that contains it."""
    tag = inputs["tags"][0]
    digest = hashlib.sha256(json.dumps([tag, inputs["buildArgs"], inputs["target"]]).encode()).hexdigest()
    return {"ref": f"{tag.rpartition(':')[0]}@sha256:{digest}", "digest": f"sha256:{digest}"}


def _context_changed(world: World, resource: Resource, inputs: Inputs) -> Iterator[str]:
    # pulumi-docker-build, provider/internal/image.go: Diff compares the hash of the context, too.
    if _context_hash(world, inputs) != builder(world).contexts.get(resource.name):
        yield "contextHash"


def _context_hash(world: World, inputs: Inputs) -> str:
    # provider/internal/context.go: content, name and mode of every file; a relative path is one of the project.
    folder = builder(world).project / inputs["context"]["location"]
    dockerfile = builder(world).project / inputs["dockerfile"]["location"]
    if not folder.is_dir():
        raise Refused(f"{inputs['context']['location']!r}: not a valid directory or URL")
    digest = hashlib.sha256(dockerfile.read_bytes())
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_mode:o}".encode() + path.read_bytes())
    return digest.hexdigest()


def _push(world: World, name: str, inputs: Inputs) -> None:
    """Build and push the image, unless the registry refuses."""
    (tag,) = inputs["tags"]
    host = tag.partition("/")[0]
    logins = {one["address"]: one for one in inputs.get("registries") or ()}
    for part, password in _PASSWORDS.items():
        if part in host and not str(logins.get(host, {}).get("password", "")).startswith(password):
            raise Refused(f"failed to push {tag}: unexpected status from HEAD request: 401 Unauthorized")
    for repository in world.of_type(REPOSITORY):
        if not tag.startswith(f"{repository.computed['repositoryUrl']}:"):
            continue
        # https://docs.aws.amazon.com/AmazonECR/latest/userguide/image-tag-mutability.html. No two builds of one
        # content have the same digest: packages are downloaded, and files get the time of the build.
        pushed = (repository.physical, tag)
        if repository.inputs.get("imageTagMutability") == "IMMUTABLE" and pushed in builder(world).pushed:
            raise Refused(f"tag invalid: The image tag '{tag.rpartition(':')[2]}' already exists and is immutable")
        builder(world).pushed.add(pushed)
    builder(world).contexts[name] = _context_hash(world, inputs)


RULES = {
    IMAGE: Rules(
        computed=_computed,
        changed=_context_changed,
        # provider/internal/image.go: Diff ignores the passwords.
        ignored=("registries[0].password",),
        on_created=lambda world, resource: _push(world, resource.name, resource.inputs),
        on_update=lambda world, resource, inputs: _push(world, resource.name, inputs),
    )
}


class _AzureLogin(loopback.Handler):
    """The authentication server of Azure's registries: https://github.com/Azure/acr/blob/main/docs/AAD-OAuth.md."""

    refused: set[str]

    def do_POST(self) -> None:
        """Exchange a token of Entra ID; refuse the first push to each registry, as its new role has not arrived."""
        form = {key: value for key, (value,) in parse_qs(self.body().decode()).items()}
        kind, service = self.path.rpartition("/")[2], form["service"]
        known = form.get("access_token", "").startswith("entra-") or form.get("refresh_token", "").startswith("acr-")
        if not known or (kind == "token" and service not in self.refused):
            self.refused.add(service)
            self.reply(401, b'{"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}')
            return
        self.reply(200, json.dumps({"refresh_token": f"acr-refresh-{secrets.token_hex(12)}"}).encode())


@functools.cache
def azure_host() -> str:
    """Return the address of Azure's registries, which answer on this machine until the tests end."""
    handler: Any = type("AzureLogin", (_AzureLogin,), {"refused": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"
