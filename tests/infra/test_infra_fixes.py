"""The command that an error suggests: it fixes the mistake, and runs in a shell as it stands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import pytest
from provider_mocks.recording import PROJECT, stack_config

from infra import stack as stacks
from infra import stack_files
from infra.config.problems import Problem, SettingsError, fix_by_setting

CLOUDS = ("aws", "azure", "gcp")
CIDRS = "network.authorized_cidrs"


def find_problems(cloud: str, overrides: Mapping[str, object], name: str = "") -> dict[str, Problem]:
    """Return the problems of a checked-in stack with these changes in its file, by key."""
    values = stack_config(cloud, overrides)
    try:
        stacks.parse(values, PROJECT, name or cloud, stack_files.UNCHECKED_SECTIONS)
    except SettingsError as error:
        return {problem.key: problem for problem in error.problems}
    return {}


def find_option_problems(cloud: str, overrides: Mapping[str, object]) -> dict[str, Problem]:
    """Return the problems of a checked-in stack with these `--set` options, by key."""
    try:
        stack_files.read(cloud, overrides).parse()
    except SettingsError as error:
        return {problem.key: problem for problem in error.problems}
    return {}


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("name", ["my_stack", "it's", "Prod.EU", "7days", "x" * 90, "google-eu", "_"])
def test_a_stack_with_an_invalid_name_is_renamed_itself_to_a_valid_name(cloud: str, name: str) -> None:
    problem = find_problems(cloud, {}, name).get("stack")
    if problem is None:
        assert cloud == "aws", "letters, digits and hyphens are valid names on AWS"
        return
    assert "<" not in problem.fix
    renames, moves = problem.fix.split(", or before `pulumi stack init`: ")
    *command, old, new = shlex.split(renames)
    assert command == ["pulumi", "stack", "rename", "--stack"], "without --stack it renames the selected stack"
    assert old == name
    assert shlex.split(moves) == ["mv", "-n", f"Pulumi.{name}.yaml", f"Pulumi.{new}.yaml"]
    assert "stack" not in find_problems(cloud, {}, new)


@pytest.mark.parametrize(("name", "access"), [(name, "inside") for name in CLOUDS] + [("aws", "bastion")])
def test_ranges_that_a_private_api_ignores_are_removed_and_the_api_stays_private(name: str, access: str) -> None:
    found = find_problems(name, {"network.api_access": access, CIDRS: ["203.0.113.7/32"]})
    assert {key: problem.fix for key, problem in found.items()} == {CIDRS: f"pulumi config rm --path {CIDRS}"}


def test_an_invalid_range_shows_a_valid_one() -> None:
    problem = find_problems("aws", {f"{CIDRS}[0]": "laptop"})[f"{CIDRS}[0]"]
    assert problem.fix == f"pulumi config set --path '{CIDRS}[0]' 203.0.113.7/32"
    assert "()" not in problem.summary


def test_a_gap_in_a_list_is_removed() -> None:
    found = find_problems("aws", {f"{CIDRS}[2]": "203.0.113.7/32"})
    assert {key: (problem.message, problem.fix) for key, problem in found.items()} == {
        CIDRS: ("no entry [0], and a list has no gaps", f"pulumi config rm --path '{CIDRS}[0]'")
    }, "one at a time, because every removal moves the entries after it"


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("cidr", ["10.1.0.0/16", "100.64.0.0/10", "127.0.0.1/32", "169.254.0.0/16", "192.168.1.0/24"])
def test_a_range_that_never_arrives_from_the_internet_is_removed(name: str, cidr: str) -> None:
    found = find_problems(name, {CIDRS: ["203.0.113.7/32", cidr]})
    assert found[f"{CIDRS}[1]"].fix == f"pulumi config rm --path '{CIDRS}[1]'"


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("cidr", ["0.0.0.0/0", "128.0.0.0/1"])
def test_an_api_for_the_whole_internet_is_refused(name: str, cidr: str) -> None:
    problem = find_problems(name, {CIDRS: [cidr]})[f"{CIDRS}[0]"]
    assert "most of the internet" in problem.message
    assert shlex.split(problem.fix)[-1] == "$(curl -s https://checkip.amazonaws.com)/32"


def test_several_private_ranges_are_removed_from_the_last_to_the_first() -> None:
    assert list(find_problems("gcp", {CIDRS: ["10.0.0.0/8", "203.0.113.7/32", "10.1.0.0/16"]})) == [
        f"{CIDRS}[2]",
        f"{CIDRS}[0]",
    ], "a removal moves the entries after it"


def test_a_private_api_has_no_name_for_the_whole_internet() -> None:
    key = "network.dns_endpoint"
    found = find_problems("gcp", {"network.api_access": "inside", key: True})
    assert {name: problem.fix for name, problem in found.items()} == {key: f"pulumi config rm --path {key}"}


def test_a_key_in_brackets_is_set_as_pulumi_sets_it() -> None:
    ids = {"us-west-2a": "subnet-0123456789abcdef0", "us-west-2b": "subnet-0fedcba9876543210"}
    overrides = {f'network.existing.subnets["{zone}"]': subnet for zone, subnet in ids.items()}
    found = stack_files.read("aws", {"network.existing.vpc_id": "vpc-0123456789abcdef0", **overrides})
    assert found.parse().settings.model_dump()["network"]["existing"]["subnets"] == ids


@pytest.mark.parametrize("path", ['tags.extra["team', "gpu..nodes", "gpu.nodes[x]", "[0]", "gpu.nodes.max]"])
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not a key, for example"):
        stack_files.read("aws", {path: "1"})


def test_a_missing_section_of_named_entries_is_set_entry_by_entry() -> None:
    problem = find_problems("aws", {"network.existing.vpc_id": "vpc-0123456789abcdef0"})["network.existing.subnets"]
    assert "{" not in problem.fix + problem.allowed
    for command in problem.fix.split("; "):
        assert re.fullmatch(
            r"pulumi config set --path 'network.existing.subnets\[\"us-west-2[ab]\"\]' subnet-[0-9a-f]{17}", command
        )


def test_a_boolean_is_written_as_pulumi_reads_it() -> None:
    assert fix_by_setting("addons.kueue", True).endswith("addons.kueue true")


@pytest.mark.parametrize(
    ("options", "key", "fix"),
    [
        ({"gpu.nodes": "3"}, "gpu.nodes", "leave --set gpu.nodes=... out; --set gpu.nodes.max=3"),
        ({CIDRS: "1.2.3.4/32"}, CIDRS, f"leave --set {CIDRS}=... out; --set '{CIDRS}[0]=1.2.3.4/32'"),
        ({f"{CIDRS}[0]": "10.0.0.0/8"}, f"{CIDRS}[0]", f"leave --set {CIDRS}[0]=... out"),
        (
            {f"{CIDRS}[0]": "0.0.0.0/0"},
            f"{CIDRS}[0]",
            f'--set "{CIDRS}[0]=$(curl -s https://checkip.amazonaws.com)/32"',
        ),
        ({"gpu.nodes.max": "1"}, "gpu.nodes.desired", "--set gpu.nodes.max=2"),
        ({"gpu.nodes.desired": "3"}, "gpu.nodes.desired", "--set gpu.nodes.max=3"),
        ({"addons.kueue": "maybe"}, "addons.kueue", "--set addons.kueue=false"),
        ({'tags.extra["team"]': "A B"}, "tags.extra.team", "--set tags.extra.team=ml-platform"),
    ],
)
def test_a_mistake_in_an_option_is_fixed_by_an_option(options: Mapping[str, object], key: str, fix: str) -> None:
    assert {name: problem.fix for name, problem in find_option_problems("aws", options).items()} == {key: fix}


def test_a_mistake_in_the_file_is_fixed_in_the_file_whatever_the_options_are() -> None:
    values = {"storage.size_gib": "2400"}
    configuration = stack_files.read("aws", values)
    broken = stack_files.Configuration(
        PROJECT, "aws", {**configuration.values, f"{PROJECT}:addons": '{"kueue": 1.5}'}, configuration.overrides
    )
    with pytest.raises(SettingsError, match=r"Fix: pulumi config set --path addons\.kueue false"):
        broken.parse()


@pytest.mark.parametrize(
    ("cloud", "key", "value", "proposal"),
    [
        ("aws", "cluster.kubernetes_version", "1.28", "1.35"),
        ("aws", "cluster.kubernetes_version", "v1.36", "1.36"),
        ("gcp", "cluster.kubernetes_version", "1.360", "1.36"),
        ("aws", "storage.throughput_mb_per_second_per_tib", 600, "500"),
        ("aws", "monitoring.log_retention_days", 370, "365"),
        ("aws", "storage.on_destroy", "deleted", "delete"),
        ("aws", "storage.on_destroy", "burn", "keep"),
    ],
)
def test_the_closest_allowed_value_is_suggested_or_else_the_default(
    cloud: str, key: str, value: object, proposal: str
) -> None:
    assert find_problems(cloud, {key: value})[key].fix == f"pulumi config set --path {key} {proposal}"


@pytest.mark.parametrize(
    ("cloud", "overrides", "summary"),
    [
        (
            "gcp",
            {"maintenance.start": "25:00"},
            "maintenance.start: not of this form: got '25:00'; allowed: HH:MM in UTC",
        ),
        ("aws", {"gpu.nodes.max": "many"}, "gpu.nodes.max: not a whole number: got 'many'; allowed: a whole number"),
        ("aws", {"gpu.nodes.max": 2000}, "gpu.nodes.max: too large: got 2000; allowed: at most 1000"),
        ("aws", {"storage": 5}, "storage: not a section with keys: got "),
        ("aws", {"addons.kueue": "maybe"}, "addons.kueue: not true or false: got 'maybe'; allowed: true or false"),
        ("aws", {"tags.owner": "A B"}, "tags.owner: not of this form: got 'A B'; allowed: 1 to 63 of a-z"),
        (
            "aws",
            {"storage.on_destroy": "burn"},
            "storage.on_destroy: unknown value: got 'burn'; allowed: keep | delete",
        ),
        ("aws", {f"{CIDRS}[0]": "laptop"}, f"{CIDRS}[0]: not a range of IPv4 addresses: got 'laptop'; allowed: for"),
    ],
)
def test_an_error_is_in_plain_words(cloud: str, overrides: Mapping[str, object], summary: str) -> None:
    [problem] = find_problems(cloud, overrides).values()
    assert problem.summary.startswith(summary)
    assert not re.search(r"\^|\(\?|input should|Nodes|dictionary", problem.summary)
