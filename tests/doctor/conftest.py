"""Fixtures of the doctor's tests: recorded responses on loopback, contexts of stacks and a fake `pulumi`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from doctor_answers import Recorded, read_context, serving
from moto.server import ThreadedMotoServer

from infra.findings.model import Context


@pytest.fixture(autouse=True)
def _network(loopback_only: None) -> None:
    """Keep every test of this folder on this machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start moto for all tests of one file."""
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """Serve the responses that a test adds, and 404 for everything else."""
    with serving(Recorded()) as server:
        yield server


@pytest.fixture
def context() -> Callable[..., Context]:
    """Return a function that builds the context of one of this repository's stacks, with overrides and outputs."""
    return read_context


@pytest.fixture
def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that puts a fake `pulumi` first on PATH; without outputs it has no stack."""

    def put(
        outputs: Mapping[str, object] | None,
        version: str = "v3.260.0",
        resources: Sequence[Mapping[str, object]] = (),
        pending: Sequence[Mapping[str, object]] = (),
        last_update: str | None = "destroy",
        backend: str = "s3://states",
    ) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "outputs.json").write_text(json.dumps(outputs or {}))
        state = {"version": 3, "deployment": {"resources": list(resources), "pending_operations": list(pending)}}
        update = {"kind": last_update, "result": "succeeded", "startTime": "2026-11-20T10:00:00.000Z"}
        update |= {"message": "", "environment": {}, "config": {}}
        (folder / "history.json").write_text(json.dumps([update] if last_update else []))
        (folder / "whoami.json").write_text(json.dumps({"user": "ann", "url": backend}))
        (folder / "state.json").write_text(json.dumps(state))
        program = folder / "pulumi"
        missing = "echo 'error: no stack named found' >&2; exit 255" if outputs is None else "exit 0"
        program.write_text(
            "#!/bin/sh\n"
            'case "$*" in\n'
            f"  *version*) echo {version};;\n"
            '  *"plugin ls"*) echo "NAME  KIND  VERSION"; echo "kubernetes  resource  4.34.2";;\n'
            "  *\"stack ls\"*) echo '[]';;\n"
            f'  *"stack export"*) cat {folder}/state.json;;\n'
            f'  *"stack history"*) cat {folder}/history.json;;\n'
            f"  *whoami*) cat {folder}/whoami.json;;\n"
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
