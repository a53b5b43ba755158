"""Whether an image exists, asked of a registry on loopback that speaks the protocol of all registries."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import pytest
from doctor_answers import Recorded

from infra.doctor import images

PATH = "/v2/team/trainer/manifests/1.2"
USER = "Basic " + base64.b64encode(b"AWS:secret").decode()


def nobody(_: str) -> None:
    return None


def somebody(_: str) -> tuple[str, str]:
    return "AWS", "secret"


def host(recorded: Recorded) -> str:
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


def test_an_image_that_is_there_is_told_with_its_digest(recorded: Recorded) -> None:
    recorded.put(PATH, {})
    recorded.headers[PATH] = {"Docker-Content-Digest": "sha256:0123456789abcdef"}
    finding = images.exists(f"{host(recorded)}/team/trainer:1.2", nobody, "http")
    assert finding.status == "ok"
    assert "(sha256:0123456789ab" in finding.result
    assert recorded.asked[0][0] == "HEAD", "the image itself is not fetched"


def test_an_image_that_is_missing_is_a_problem(recorded: Recorded) -> None:
    finding = images.exists(f"{host(recorded)}/team/trainer:1.3", nobody, "http")
    assert (finding.status, finding.cause) == ("problem", "image-missing")
    assert finding.result.endswith("has no team/trainer 1.3")


def test_a_registry_that_wants_a_token_gets_the_one_that_its_challenge_names(recorded: Recorded) -> None:
    def manifest(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
        return (200, {}) if query["authorization"] == "Bearer granted" else (401, {})

    def token(query: Mapping[str, str], _: bytes) -> tuple[int, object]:
        assert query["scope"] == "repository:team/trainer:pull"
        return (200, {"token": "granted"}) if query["authorization"] == USER else (401, {})

    realm = f'Bearer realm="{recorded.url}/token",service="r",scope="repository:team/trainer:pull"'
    recorded.answers |= {PATH: manifest, "/token": token}
    recorded.headers[PATH] = {"WWW-Authenticate": realm}
    image = f"{host(recorded)}/team/trainer:1.2"
    assert images.exists(image, somebody, "http").status == "ok"
    closed = images.exists(image, nobody, "http")
    assert (closed.status, closed.cause) == ("unknown", "image-closed"), "nodes may still be allowed to pull it"


def test_a_registry_that_wants_a_password_gets_it(recorded: Recorded) -> None:
    recorded.answers[PATH] = lambda query, _: (200, {}) if query["authorization"] == USER else (401, {})
    recorded.headers[PATH] = {"WWW-Authenticate": 'Basic realm="r"'}
    assert images.exists(f"{host(recorded)}/team/trainer:1.2", somebody, "http").status == "ok"


def test_a_name_without_a_registry_is_a_matter_of_the_nodes() -> None:
    assert images.exists("trainer:dev", nobody).status == "skipped"


def test_a_registry_that_does_not_answer_is_not_known() -> None:
    finding = images.exists("127.0.0.1:1/trainer:1", nobody, "http")
    assert (finding.status, finding.cause) == ("unknown", "slow")
