"""Fixtures of the doctor's tests: loopback only, recorded answers over HTTP, settings of every stack."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from doctor_answers import Recorded, serving

from infra import stack_files as configuration
from infra.findings.model import Context


@pytest.fixture(autouse=True)
def _network(loopback_only: None) -> None:
    """Keep every test of this folder on this machine."""


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """A server that answers what a test puts into it, and 404 to everything else."""
    with serving(Recorded()) as server:
        yield server


@pytest.fixture
def context() -> Callable[..., Context]:
    """What the checks of a stack of this repository are made from, with settings on top and outputs where it is up."""

    def made(
        stack: str, overrides: Mapping[str, object] | None = None, outputs: Mapping[str, object] | None = None
    ) -> Context:
        read = configuration.read(stack, overrides)
        parsed = read.parse()
        return Context(parsed.settings, read.values, parsed.sections["job"].model_extra or {}, outputs)

    return made


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, object] | None], Path]:
    """A `pulumi` first on PATH, whose stacks have these outputs, or are not there with None."""

    def put(outputs: Mapping[str, object] | None, version: str = "v3.260.0") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "outputs.json").write_text(json.dumps(outputs or {}))
        program = folder / "pulumi"
        missing = "echo 'error: no stack named found' >&2; exit 255" if outputs is None else "exit 0"
        program.write_text(
            "#!/bin/sh\n"
            'case "$*" in\n'
            f"  *version*) echo {version};;\n"
            '  *"plugin ls"*) echo "NAME  KIND  VERSION"; echo "kubernetes  resource  4.34.2";;\n'
            "  *\"stack ls\"*) echo '[]';;\n"
            f'  *"stack output"*) cat {folder}/outputs.json;;\n'
            f'  *"stack select"*) {missing};;\n'
            "esac\n"
        )
        program.chmod(0o755)
        language = folder / "pulumi-language-python"
        language.write_text("#!/bin/sh\n")
        language.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return folder

    return put
