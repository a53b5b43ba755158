"""A stack whose Kubernetes API would refuse this machine is refused before its control plane is paid for."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest
from provider_mocks.recording import PROJECT, Recording, stack_config

from infra import stack as stacks
from infra import stack_files
from infra.config.problems import SettingsError

Stack = Callable[..., Recording]

CLOUDS = ("aws", "azure", "gcp")
WITHOUT_ACCESS = {"network.api_access": "authorized_ranges"}
LAPTOP = ["203.0.113.7/32"]


@pytest.mark.parametrize("name", CLOUDS)
def test_the_checked_in_stack_is_refused_before_any_resource(stack: Stack, name: str) -> None:
    refused = stack(name, WITHOUT_ACCESS, fails=True)
    assert not refused.registrations, "a control plane takes ten minutes, and its first object would time out"
    [line] = [line for line in str(refused.error).splitlines() if "network.api_access" in line]
    assert f". Fix: pulumi config set --stack {name} --path" in line, "one line with the command"


@pytest.mark.parametrize("name", CLOUDS)
def test_the_suggested_command_is_one_word_per_argument_and_lets_the_stack_up(stack: Stack, name: str) -> None:
    error = str(stack(name, WITHOUT_ACCESS, fails=True).error)
    *_, path, value = shlex.split(error.partition("Fix: ")[2])
    assert value in ("true", "$(curl -s https://checkip.amazonaws.com)/32"), "it must run as it stands"
    given = True if value == "true" else LAPTOP
    assert stack(name, {path.removesuffix("[0]"): given}).registrations


@pytest.mark.parametrize("name", CLOUDS)
def test_a_machine_inside_the_network_may_leave_the_api_private(stack: Stack, name: str) -> None:
    assert stack(name, {"network.api_access": "inside"}).registrations


@pytest.mark.parametrize("name", CLOUDS)
def test_ranges_for_a_private_api_are_refused(stack: Stack, name: str) -> None:
    error = str(stack(name, {"network.api_access": "inside", "network.authorized_cidrs": LAPTOP}, fails=True).error)
    assert "network.authorized_cidrs: ignored, because network.api_access is 'inside'" in error
    assert "pulumi config rm --path network.authorized_cidrs" in error


@pytest.mark.parametrize(("name", "service"), [("azure", "azureml"), ("gcp", "vertex")])
def test_a_training_service_has_no_api_to_reach(name: str, service: str) -> None:
    on_service = {"job.launcher": service}
    values = stack_config(name, on_service)
    assert stacks.parse(values, PROJECT, name, stack_files.UNCHECKED_SECTIONS, [stacks.find_access_problems])
    with pytest.raises(SettingsError, match=r"network.api_access: a key of clusters"):
        stack_files.read(name, {**on_service, "network.api_access": "inside"}).parse()


@pytest.mark.parametrize("name", CLOUDS)
def test_the_cost_of_a_stack_needs_no_access(name: str) -> None:
    assert stack_files.read(name).parse().settings.cost_lines(1)
