"""Whether the image of `job.image` exists, asked of its registry by the protocol that all registries speak."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from urllib.parse import urlencode

import urllib3

from infra.findings.common_causes import IMAGE_CLOSED, NO_IMAGE, SLOW
from infra.findings.model import Finding, ok, problem, skipped, unknown

#: What a manifest may be: an index or an image, in Docker's spelling and in that of OCI.
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
Login = Callable[[str], tuple[str, str] | None]


def exists(image: str, login: Login, scheme: str = "https") -> Finding:
    """Ask for the manifest; `login` knows users and passwords of the cloud's own registries by host."""
    host, repository, reference = split(image)
    if host is None:
        return skipped(f"{image} names no registry: the nodes themselves must have it")
    url = f"{scheme}://{host}/v2/{repository}/manifests/{reference}"
    try:
        response = _asked(url, login(host))
    except urllib3.exceptions.HTTPError as error:
        return unknown(SLOW, f"{host} does not answer ({type(error).__name__})")
    if response.status == 200:  # HTTP: OK
        digest = response.headers.get("Docker-Content-Digest", "")
        return ok(f"{image} is there" + (f" ({digest[:19]})" if digest else ""))
    if response.status == 404:  # HTTP: not found
        return problem(NO_IMAGE, f"{host} has no {repository} {reference}", image="<image>")
    return unknown(IMAGE_CLOSED, f"{host} answers {response.status} for {repository} {reference}", host=host)


def split(image: str) -> tuple[str | None, str, str]:
    """Host, repository and tag or digest; the host is None for a name that only the nodes know (`trainer:dev`)."""
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


def _asked(url: str, login: tuple[str, str] | None) -> urllib3.BaseHTTPResponse:
    """One HEAD, once more with the token that the registry's challenge asks for (distribution's token protocol)."""
    basic = {"Authorization": "Basic " + base64.b64encode(":".join(login).encode()).decode()} if login else {}
    response = _send("HEAD", url, {"Accept": _ACCEPT})
    challenge = response.headers.get("WWW-Authenticate", "")
    if response.status != 401:  # HTTP: unauthorised
        return response
    if challenge.lower().startswith("basic"):
        return _send("HEAD", url, {"Accept": _ACCEPT} | basic) if basic else response
    fields = dict(_CHALLENGE.findall(challenge))
    if "realm" not in fields:
        return response
    query = urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    granted = _send("GET", f"{fields['realm']}?{query}", basic)
    if granted.status != 200:  # HTTP: OK
        return granted
    body = json.loads(granted.data)
    token = body.get("token") or body.get("access_token")
    return _send("HEAD", url, {"Accept": _ACCEPT, "Authorization": f"Bearer {token}"})


def _send(method: str, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
    return urllib3.request(method, url, headers=headers, timeout=_TIMEOUT, retries=False)
