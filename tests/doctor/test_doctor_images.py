"""The doctor's check of the image, against a registry on loopback."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest
from doctor_answers import Recorded

from infra.doctor import images

PATH = "/v2/team/trainer/manifests/1.2"
USER = "Basic " + base64.b64encode(b"AWS:secret").decode()


def no_login(_: str) -> None:
    """Return no credentials."""


def login(_: str) -> tuple[str, str]:
    """Return credentials."""
    return "AWS", "secret"


def host(recorded: Recorded) -> str:
    """Return the registry's host and port."""
    return recorded.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("trainer:dev", (None, "trainer", "dev")),
        ("trainer", (None, "trainer", "latest")),
        ("team/trainer:1.2", ("registry-1.docker.io", "team/trainer", "1.2")),
        ("localhost:5000/trainer", ("localhost:5000", "trainer", "latest")),
        ("ghcr.io/team/trainer@sha256:ab", ("ghcr.io", "team/trainer", "sha256:ab")),
        ("ghcr.io/team/trainer:1.2@sha256:ab", ("ghcr.io", "team/trainer", "sha256:ab")),
    ],
)
def test_a_name_is_split_as_docker_does(image: str, parts: tuple[str | None, str, str]) -> None:
    assert images.split(image) == parts


def test_an_existing_image_is_ok_with_its_digest(recorded: Recorded) -> None:
    recorded.put(PATH, {})
    recorded.headers[PATH] = {"Docker-Content-Digest": "sha256:0123456789abcdef"}
    finding = images.exists(f"{host(recorded)}/team/trainer:1.2", no_login, "http")
    assert finding.status == "ok"
    assert "(sha256:0123456789ab" in finding.result
    assert recorded.requests[0][0] == "HEAD", "the image itself is not downloaded"


def test_a_missing_image_is_a_problem(recorded: Recorded) -> None:
    finding = images.exists(f"{host(recorded)}/team/trainer:1.3", no_login, "http")
    assert (finding.status, finding.cause) == ("problem", "image-missing")
    assert finding.result.endswith("has no team/trainer 1.3")


def test_a_registry_that_requires_a_token_gets_one_from_its_realm(recorded: Recorded) -> None:
    def manifest(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
        return (200, {}) if query["authorization"] == "Bearer granted" else (401, {})

    def token(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
        assert query["scope"] == "repository:team/trainer:pull"
        return (200, {"token": "granted"}) if query["authorization"] == USER else (401, {})

    realm = f'Bearer realm="{recorded.url}/token",service="r",scope="repository:team/trainer:pull"'
    recorded.answers |= {PATH: manifest, "/token": token}
    recorded.headers[PATH] = {"WWW-Authenticate": realm}
    image = f"{host(recorded)}/team/trainer:1.2"
    assert images.exists(image, login, "http").status == "ok"
    denied = images.exists(image, no_login, "http")
    assert (denied.status, denied.cause) == ("unknown", "image-closed"), "nodes may still be allowed to pull it"


def test_a_registry_with_basic_authentication_gets_the_password(recorded: Recorded) -> None:
    recorded.answers[PATH] = lambda query, _: (200, {}) if query["authorization"] == USER else (401, {})
    recorded.headers[PATH] = {"WWW-Authenticate": 'Basic realm="r"'}
    assert images.exists(f"{host(recorded)}/team/trainer:1.2", login, "http").status == "ok"


def test_a_name_without_a_registry_is_skipped() -> None:
    assert images.exists("trainer:dev", no_login).status == "skipped"


def test_a_registry_that_does_not_respond_is_unknown() -> None:
    finding = images.exists("127.0.0.1:1/trainer:1", no_login, "http")
    assert (finding.status, finding.cause) == ("unknown", "slow")
