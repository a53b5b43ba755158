"""The login of `up` at an Azure registry, for the push of the image."""

from __future__ import annotations

import pulumi
import pytest
from provider_mocks.recording import Recording, run_stack

from infra.clouds.azure import registry_token
from infra.clouds.azure.registry_token import PushError


@pytest.mark.parametrize(("status", "fix"), [(401, "AcrPush"), (None, "az acr check-health")])
def test_up_continues_without_a_login_and_says_why(
    status: int | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged image needs none, and a changed one fails at its push with the cause above it."""

    async def refuse(*_: str) -> str:
        raise PushError("no route to host", status)

    warnings: list[str] = []
    monkeypatch.setattr(registry_token, "push_token", refuse)
    monkeypatch.setattr(pulumi.log, "warn", lambda message, *_: warnings.append(message))
    recording = _run()
    assert _password(recording) == ""
    (warning,) = (text for text in warnings if "no login to" in text)
    assert fix in warning


def test_a_preview_requests_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulumi.runtime, "is_dry_run", lambda: True)
    recording = _run()
    assert _password(recording) == ""
    assert not [token for token, _ in recording.calls if token.endswith("getClientToken")]


def test_the_token_is_requested_after_the_role_and_the_private_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = _run()
    image = recording.one("docker-build:index:Image")
    for kind, name in (
        ("azure-native:authorization:RoleAssignment", "azure-registry-push-caller"),
        ("azure-native:network:PrivateDnsZoneGroup", None),
    ):
        found = [one for one in recording.of_type(kind) if name is None or one.name == name]
        assert any(recording.needs(image, one) for one in found), f"the push does not wait for {kind}"


def _run() -> Recording:
    recording = run_stack("azure")
    assert recording.error is None
    return recording


def _password(recording: Recording) -> str:
    (login,) = recording.one("docker-build:index:Image").inputs["registries"]["value"]
    return str(login.get("password", ""))
