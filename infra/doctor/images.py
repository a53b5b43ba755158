"""The check that the image of `job.image` exists, through the registry API (OCI distribution specification)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlencode

import urllib3

from infra.findings.common_causes import IMAGE_CLOSED, NO_IMAGE, SLOW
from infra.findings.model import Finding, ok, problem, skipped, unknown

#: Media types of a manifest: an index or an image, of Docker and of OCI.
_ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT = urllib3.Timeout(connect=5, read=15)
#: Returns user and password for a registry's host, None for an unknown host.
Login = Callable[[str], tuple[str, str] | None]


def exists(image: str, login: Login, scheme: str = "https") -> Finding:
    """Check that the registry has the image; `login` provides the credentials of the cloud's own registries."""
    host, repository, reference = split(image)
    if host is None:
        return skipped(f"{image} has no registry: the nodes must have it already")
    url = f"{scheme}://{host}/v2/{repository}/manifests/{reference}"
    try:
        response = _head_manifest(url, login(host))
    except urllib3.exceptions.HTTPError as error:
        return unknown(SLOW, f"{host} does not respond ({type(error).__name__})")
    if response.status == HTTPStatus.OK:
        digest = response.headers.get("Docker-Content-Digest", "")
        return ok(f"{image} exists" + (f" ({digest[:19]})" if digest else ""))
    if response.status == HTTPStatus.NOT_FOUND:
        return problem(NO_IMAGE, f"{host} has no {repository} {reference}", image="<image>")
    return unknown(IMAGE_CLOSED, f"{host} responds {response.status} for {repository} {reference}", host=host)


def split(image: str) -> tuple[str | None, str, str]:
    """Return host, repository and tag or digest; the host is None for a name without registry (`trainer:dev`)."""
    name, at, digest = image.partition("@")
    last = name.rpartition("/")[2]
    tag = last.partition(":")[2] or "latest"
    name = name[: len(name) - len(tag) - 1] if ":" in last else name
    first, slash, rest = name.partition("/")
    reference = digest if at else tag
    if not slash:
        return None, name, reference
    if "." in first or ":" in first or first == "localhost":
        return first, rest, reference
    return "registry-1.docker.io", name, reference


def _head_manifest(url: str, login: tuple[str, str] | None) -> urllib3.BaseHTTPResponse:
    """Send a HEAD request, and repeat it with the token that the registry requests.

    See https://distribution.github.io/distribution/spec/auth/token/.
    """
    basic = {"Authorization": "Basic " + base64.b64encode(":".join(login).encode()).decode()} if login else {}
    response = _send("HEAD", url, {"Accept": _ACCEPT})
    challenge = response.headers.get("WWW-Authenticate", "")
    if response.status != HTTPStatus.UNAUTHORIZED:
        return response
    if challenge.lower().startswith("basic"):
        return _send("HEAD", url, {"Accept": _ACCEPT} | basic) if basic else response
    fields = dict(_CHALLENGE.findall(challenge))
    if "realm" not in fields:
        return response
    query = urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    granted = _send("GET", f"{fields['realm']}?{query}", basic)
    if granted.status != HTTPStatus.OK:
        return granted
    body = json.loads(granted.data)
    token = body.get("token") or body.get("access_token")
    return _send("HEAD", url, {"Accept": _ACCEPT, "Authorization": f"Bearer {token}"})


def _send(method: str, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
    """Send one request without retries."""
    return urllib3.request(method, url, headers=headers, timeout=_TIMEOUT, retries=False)
