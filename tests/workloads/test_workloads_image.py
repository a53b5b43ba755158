"""The trainer's image: built for the cluster's registry and fabric, or given by `job.image`."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from pulumi.runtime.rpc import _special_secret_sig, _special_sig_key
from workload_facts import CLOUDS, ROOT, record_facts

from provider_mocks.recording import Recording, run_stack  # isort: skip

from workloads import image
from workloads.errors import UserError

BUILD = "docker-build:index:Image"
DOCKERFILE = (ROOT / image.DOCKERFILE).read_text()


def build_image(stack: str, overrides: dict[str, Any] | None = None) -> tuple[Recording, dict[str, Any]]:
    """Run a stack's program; return the recording and the inputs of its image."""
    recording = run_stack(stack, overrides)
    assert recording.error is None
    return recording, dict(recording.one(BUILD).inputs)


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_image_is_built_for_the_clouds_fabric_and_pushed_to_its_registry(cloud: str) -> None:
    recording, inputs = build_image(cloud)
    assert inputs["target"] == record_facts(cloud).fabric.image_target
    assert re.search(rf"^FROM \S+ AS {inputs['target']}$", DOCKERFILE, re.MULTILINE), (
        "the Dockerfile has no such target"
    )
    assert inputs["push"] is True
    assert inputs["buildOnPreview"] is False, "a preview changes nothing, and building takes minutes"
    (tag,) = inputs["tags"]
    assert tag.startswith(f"{recording.exports['registry']}:")
    assert inputs["buildArgs"] == {"ACCELERATOR": "gpu"}
    assert inputs["platforms"] == ["linux/amd64"]


@pytest.mark.parametrize(
    ("cloud", "user"),
    [("aws", "AWS"), ("azure", "00000000-0000-0000-0000-000000000000"), ("gcp", "oauth2accesstoken")],
)
def test_the_push_has_credentials_that_the_engine_keeps_secret(cloud: str, user: str) -> None:
    """The engine encrypts values with this signature in the state and hides them on the screen."""
    recording, inputs = build_image(cloud)
    assert inputs["registries"][_special_sig_key] == _special_secret_sig
    (login,) = inputs["registries"]["value"]
    assert login["username"] == user
    assert login["password"]
    assert str(recording.exports["registry"]).startswith(login["address"])


def test_a_given_image_is_not_built() -> None:
    given = f"registry.example/mine@sha256:{'1' * 64}"
    recording = run_stack("aws", {"job.image": given})
    assert recording.error is None
    assert recording.of_type(BUILD) == []
    assert recording.exports["job"]["image"] == given
    requested = [token for token, _ in recording.calls if "getAuthorizationToken" in token]
    assert not requested, "without a build nothing is pushed"


def test_the_base_image_is_a_build_argument() -> None:
    _, inputs = build_image("aws", {"job.base_image": "ubuntu@sha256:2"})
    assert inputs["buildArgs"]["BASE_IMAGE"] == "ubuntu@sha256:2"
    for argument in inputs["buildArgs"]:
        assert re.search(rf"^ARG {argument}\b", DOCKERFILE, re.MULTILINE), f"the Dockerfile has no ARG {argument}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small repository whose image is built."""
    for name in ("trainer", "trainer/__pycache__"):
        (tmp_path / name).mkdir()
    for name in (".dockerignore", "LICENSE", "trainer/Dockerfile", "trainer/a.py", "trainer/entrypoint.sh"):
        (tmp_path / name).write_text("1")
    (tmp_path / "trainer/entrypoint.sh").chmod(0o755)
    monkeypatch.setattr(image, "ROOT", tmp_path)
    return tmp_path


def test_changed_content_gets_another_tag(checkout: Path) -> None:
    def tag() -> str:
        return image.content_hash("default", [])

    first = tag()
    assert image.content_hash("aws", []) != first
    assert image.content_hash("default", [("ACCELERATOR", "cpu")]) != first
    found = {first}
    for number, name in enumerate((".dockerignore", "LICENSE", "trainer/Dockerfile", "trainer/a.py"), start=2):
        (checkout / name).write_text("2")
        found.add(tag())
        assert len(found) == number, f"a change of {name} changes the image"
    (checkout / "trainer/entrypoint.sh").chmod(0o644)
    assert tag() not in found, "the image does not start"


def test_files_outside_the_image_change_neither_its_tag_nor_its_context(checkout: Path) -> None:
    first = image.content_hash("default", []), image.stage_context(checkout)
    for name in ("__pycache__/a.pyc", "README.md", "quickstart.svg", ".a.py.swp", "a.py~"):
        (checkout / "trainer" / name).write_text("words")
    assert (image.content_hash("default", []), image.stage_context(checkout)) == first
    copied = {path.name for path in (checkout / first[1]).rglob("*") if path.is_file()}
    assert copied == {".dockerignore", "LICENSE", "Dockerfile", "a.py", "entrypoint.sh"}


def test_another_checkout_has_the_same_context(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The provider compares the path, and each file's name, mode and content (pulumi-docker-build: image.go, Diff)."""
    location = image.stage_context(checkout)
    assert not location.is_absolute()
    other = tmp_path_factory.mktemp("other")
    (checkout / "trainer/a.py").chmod(0o664)
    (checkout / "LICENSE").chmod(0o600)
    before = os.umask(0o077)
    try:
        assert image.stage_context(other) == location
    finally:
        os.umask(before)

    def modes(folder: Path) -> dict[str, int]:
        return {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}

    assert modes(other / location) == modes(checkout / location)
    assert set(modes(other / location).values()) == {0o644, 0o755}, "the image's user reads every file"


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_provider_finds_the_context_in_the_projects_folder(cloud: str) -> None:
    """It runs in the folder of Pulumi.yaml, where `up` may be called from any other."""
    _, inputs = build_image(cloud)
    context, dockerfile = Path(inputs["context"]["location"]), Path(inputs["dockerfile"]["location"])
    assert not context.is_absolute()
    assert (ROOT / context).is_dir()
    assert dockerfile == context / image.DOCKERFILE
    assert (ROOT / dockerfile).read_text() == DOCKERFILE


def test_a_build_by_hand_copies_the_same_files() -> None:
    """Docker applies .dockerignore to the whole repository, `up` to the folder with the files that the tag covers."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    names = [path for path in (ROOT / "trainer").rglob("*") if path.is_file()]
    names += [path for path in ROOT.iterdir() if path.is_file()]
    by_hand = {path for path in names if not _is_ignored(path.relative_to(ROOT), rules)}
    staged = set(image._sources(ROOT))
    assert by_hand == {path for path in staged if not _is_ignored(path.relative_to(ROOT), rules)}
    assert staged - by_hand == {ROOT / ".dockerignore", ROOT / image.DOCKERFILE}, "only the build itself reads these"


def test_the_tag_covers_every_file_that_the_dockerfile_copies() -> None:
    commands = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [name for command in commands for name in command.split() if not name.startswith("--")]
    assert "trainer/requirements-${ACCELERATOR}.txt" in sources
    covered = {path.relative_to(ROOT).as_posix() for path in image._sources(ROOT)}
    for name in sources:
        pattern = re.sub(r"\$\{\w+\}", "*", name)
        assert any(fnmatch(path, pattern) or path.startswith(f"{pattern}/") for path in covered), name


def _is_ignored(path: Path, rules: list[str]) -> bool:
    """Return whether .dockerignore excludes a file: the last rule that matches it or one of its folders counts."""
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        parts = path.parts if pattern.startswith("**/") else [path.as_posix(), *map(str, path.parents)]
        if any(fnmatch(part, pattern.removeprefix("**/")) for part in parts if part != "."):
            ignored = not rule.startswith("!")
    return ignored


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_topology_file_of_a_fabric_is_in_its_image(cloud: str) -> None:
    fabric = record_facts(cloud).fabric
    path = fabric.env.get("NCCL_TOPO_FILE")
    if path is None:
        assert fabric.name != "infiniband", "without it NCCL guesses which network card is near which GPU"
        return
    stage = DOCKERFILE.partition(f" AS {fabric.image_target}\n")[2].partition("\nFROM ")[0]
    assert path in stage


def test_an_edited_context_is_staged_again(checkout: Path) -> None:
    folder = checkout / image.stage_context(checkout)
    (folder / "trainer/a.py").write_text("import malware")
    assert checkout / image.stage_context(checkout) == folder
    assert (folder / "trainer/a.py").read_text() == (checkout / "trainer/a.py").read_text()


def test_sources_that_change_during_the_copy_are_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = image._copy

    def copy_later(path: Path, target: Path) -> None:
        if path.name == "a.py":
            path.write_text("changed during up")
        real(path, target)

    monkeypatch.setattr(image, "_copy", copy_later)
    with pytest.raises(UserError, match=r"changed while they were read\. Fix: run the command again$"):
        image.stage_context(checkout)
    assert not list((checkout / image.CONTEXTS).iterdir()), "nothing half made is left"


def test_a_link_in_the_sources_is_refused(checkout: Path) -> None:
    (checkout / "trainer/link.py").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"symbolic link .*link\.py; allowed: files\. Fix: "):
        image.content_hash("default", [])
