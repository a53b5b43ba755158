"""The verbs with the real engine, on a small program whose resources a test can fail, slow down or cut off."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from provider_mocks.recording import ROOT

from infra import clouds
from infra import stack_files as configuration
from infra.automation import LiveStack, OperationError, account
from infra.automation.display import Silent
from infra.automation.engine import Engine

pytestmark = pytest.mark.skipif(
    shutil.which("pulumi") is None, reason="no `pulumi` on PATH: https://www.pulumi.com/docs/install/"
)

#: Three resources in a row, one reading `job.run`; a file beside the program makes the second fail or wait.
PROGRAM = """
import os
import pulumi
from pulumi import dynamic

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Provider(dynamic.ResourceProvider):
    def create(self, props):
        import os, time

        folder, name = props["folder"], props["name"]
        if name == "second" and os.path.exists(folder + "/fail"):
            raise Exception("QuotaExceeded: no more of these\\nrequest 7f")
        if name == "second" and os.path.exists(folder + "/wait"):
            open(folder + "/waiting", "w").close()
            for _ in range(600):
                if not os.path.exists(folder + "/wait"):
                    break
                time.sleep(0.1)
        return dynamic.CreateResult(name, props)

    def diff(self, id, old, new):
        return dynamic.DiffResult(changes=old["run"] != new["run"])

    def update(self, id, old, new):
        return dynamic.UpdateResult(new)


class Thing(dynamic.Resource):
    def __init__(self, name, run="", before=()):
        props = {"folder": FOLDER, "name": name, "run": run}
        super().__init__(Provider(), name, props, pulumi.ResourceOptions(depends_on=list(before)))


run = (pulumi.Config().get_object("job") or {}).get("run", "default")
first = Thing("first")
second = Thing("second", before=[first])
third = Thing("third", run, before=[second])
pulumi.export("account", "https://127.0.0.1:6443")
pulumi.export("cluster_name", "laptop")
pulumi.export("kubeconfig", pulumi.Output.secret("very secret"))
pulumi.export("bucket_uri", "file:///data/work")
pulumi.export("checkpoint_uri", "file:///data/work/checkpoints")
pulumi.export("hourly_cost_usd", {"on_demand": 0.0, "spot": 0.0, "on_demand_at_max": 0.0, "spot_at_max": 0.0})
pulumi.export("next_steps", ["kubectl get pods"])
pulumi.export("job", {"run": run})
"""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine keeps its own files, and this Python first for the programs it starts."""
    return tmp_path_factory.mktemp("pulumi")


@pytest.fixture
def engine_env(home: Path, tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of this test's own, and nobody's login."""
    (tmp_path / "states").mkdir()
    for name in [name for name in os.environ if name.startswith("PULUMI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PULUMI_HOME", str(home))
    monkeypatch.setenv("PULUMI_BACKEND_URL", (tmp_path / "states").as_uri())
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "right")
    monkeypatch.setenv("PULUMI_SKIP_UPDATE_CHECK", "1")


@pytest.fixture
def project(tmp_path: Path, engine_env: None) -> Path:
    """A project with the settings of stack `local` and the small program."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("Pulumi.yaml", "Pulumi.local.yaml"):
        shutil.copy(ROOT / name, folder)
    (folder / "__main__.py").write_text(PROGRAM)
    return folder


def live(project: Path, settings: Mapping[str, object] | None = None, **options: Any) -> LiveStack:
    return LiveStack("local", settings, folder=project, display=Silent(), **options)


def infra(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m infra ...` as a person types it."""
    command = [sys.executable, "-m", "infra", words[0], "--stack", "local", "--cwd", str(project), *words[1:]]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def state(project: Path, tmp_path: Path) -> dict[str, Any]:
    """The stack's state as it lies in the backend."""
    (path,) = (tmp_path / "states").rglob("stacks/**/local.json")
    found: dict[str, Any] = json.loads(path.read_text())["checkpoint"]["latest"]
    return found


def test_a_stack_goes_from_nothing_to_up_and_back(project: Path, tmp_path: Path) -> None:
    stack = live(project)
    assert stack.preview().counts == {"create": 3}
    outputs = stack.up()
    assert outputs.cluster_name == "laptop"
    assert outputs.kubeconfig == "very secret"
    assert outputs.job == {"run": "default"}
    assert "very secret" not in (next((tmp_path / "states").rglob("stacks/**/local.json"))).read_text()

    before = (project / "Pulumi.local.yaml").read_text()
    assert live(project, {"job.run": "other"}).preview().counts == {"update": 1}
    assert (project / "Pulumi.local.yaml").read_text() == before, "a preview only tries its settings"
    assert live(project, {"job.run": "other"}).up().job == {"run": "other"}
    assert "run: other" in (project / "Pulumi.local.yaml").read_text(), "else the next `up` would undo it"
    assert not list(project.glob(".Pulumi.*")), "the copy that was tried is gone"

    unchanged = live(project).preview()
    assert not unchanged
    assert unchanged.num_unchanged == 3
    live(project).refresh()
    assert live(project).destroy().counts == {"deleted": 3}
    assert not [item for item in state(project, tmp_path).get("resources") or [] if item.get("custom")]


def test_an_error_in_the_middle_says_what_failed_what_is_left_and_what_to_run(project: Path, tmp_path: Path) -> None:
    (project / "fail").touch()
    shown = infra(project, "up", "--yes")
    assert shown.returncode == 1
    told = shown.stderr[shown.stderr.index("error: ") :].splitlines()
    assert told[0] == "error: pulumi-python:dynamic:Resource second: QuotaExceeded: no more of these"
    assert told[1].strip() == "left: 1 resources in the state"
    assert told[2].strip().startswith("fix the cause, then: python -m infra up --stack local")
    assert "Traceback" not in shown.stderr
    assert re.search(r"^created +pulumi-python:dynamic:Resource  first  \d+\.\d s$", shown.stderr, re.MULTILINE)
    (project / "fail").unlink()
    assert live(project).up().cluster_name == "laptop", "what was made is kept, and the rest is made now"


def test_ctrl_c_lets_the_running_step_end_and_leaves_a_usable_state(project: Path, tmp_path: Path) -> None:
    (project / "wait").touch()
    process, errors = _started(project)
    process.send_signal(signal.SIGINT)
    _until(lambda: "cancelling" in errors.read_text(), process)
    (project / "wait").unlink()
    assert process.wait(timeout=120) == 130
    told = errors.read_text()
    assert "was cancelled" in told
    assert "to go on: python -m infra up --stack local" in told
    assert "Traceback" not in told
    found = state(project, tmp_path)
    assert not found.get("pending_operations")
    assert not list((tmp_path / "states").rglob("locks/**/*.json")), "the lock is given back"
    assert live(project).up().cluster_name == "laptop"


def test_a_second_ctrl_c_stops_at_once_and_the_refresh_names_what_is_half_made(project: Path, tmp_path: Path) -> None:
    (project / "wait").touch()
    process, errors = _started(project)
    process.send_signal(signal.SIGINT)
    _until(lambda: "cancelling" in errors.read_text(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, "the step that is under way would take a minute"
    assert "stopping at once" in errors.read_text()
    (project / "wait").unlink()
    if list((tmp_path / "states").rglob("locks/**/*.json")):
        subprocess.run(["pulumi", "cancel", "--yes", "--stack", "local"], cwd=project, check=True, capture_output=True)
    shown = infra(project, "refresh")
    assert shown.returncode == 0, shown.stderr
    assert not state(project, tmp_path).get("pending_operations")
    assert live(project).up().cluster_name == "laptop"


def _started(project: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """An `up` that is in the middle of its second resource, and the file that it writes its progress to."""
    errors = project / "stderr.txt"
    command = [sys.executable, "-m", "infra", "up", "--stack", "local", "--cwd", str(project), "--yes"]
    with errors.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stream, stdout=subprocess.DEVNULL)
    _until((project / "waiting").exists, process)
    return process, errors


def _until(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for something that the process does; its end without it is a failure."""
    limit = time.monotonic() + 240
    while not there():
        assert process.poll() is None, "ended before it got there"
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_locked_stack_says_who_holds_it_and_how_to_unlock_it(project: Path, tmp_path: Path) -> None:
    subprocess.run(["pulumi", "stack", "init", "local"], cwd=project, check=True, capture_output=True)
    locks = tmp_path / "states" / ".pulumi" / "locks" / "organization" / "torchrec-cloud" / "local"
    locks.mkdir(parents=True, exist_ok=True)
    holder = {"pid": 28211, "username": "ann", "hostname": "laptop", "timestamp": "2026-11-21T15:24:37Z"}
    (locks / "0a2af24d-369c-47b5-a875-878cd5e06022.json").write_text(json.dumps(holder))
    shown = infra(project, "up", "--yes")
    assert shown.returncode == 2
    assert "locked by ann@laptop (pid 28211)" in shown.stderr
    assert "pulumi cancel --stack local" in shown.stderr


def test_what_keeps_a_stack_from_opening_is_told_in_one_line(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OperationError, match="no stack 'local'; stacks here: none; files of settings for: local"):
        live(project).destroy()
    subprocess.run(["pulumi", "stack", "init", "local"], cwd=project, check=True, capture_output=True)
    with pytest.raises(OperationError, match="no stack 'nope'; stacks here: local"):
        LiveStack("nope", folder=project, display=Silent()).up()
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "wrong")
    with pytest.raises(OperationError, match="wrong passphrase"):
        live(project).preview()
    monkeypatch.delenv("PULUMI_BACKEND_URL")
    with pytest.raises(OperationError, match="pulumi login --local"):
        live(project).preview()


def test_a_set_that_is_refused_changes_neither_file_nor_state(project: Path, tmp_path: Path) -> None:
    before = (project / "Pulumi.local.yaml").read_text()
    shown = infra(project, "up", "--yes", "--set", "gpu.nodez=3")
    assert shown.returncode == 2
    assert "gpu.nodez" in shown.stderr
    assert (project / "Pulumi.local.yaml").read_text() == before
    assert not list((tmp_path / "states").rglob("local.json"))


def test_another_accounts_credentials_do_not_destroy_a_stack(
    project: Path, tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(project).up()
    other = tmp_path / "other-kubeconfig"
    other.write_text(kubeconfig.read_text().replace("6443", "7777"))
    monkeypatch.setenv("KUBECONFIG", str(other))
    shown = infra(project, "destroy", "--yes")
    assert shown.returncode == 2
    assert "https://127.0.0.1:6443" in shown.stderr
    assert "https://127.0.0.1:7777" in shown.stderr
    assert len(state(project, tmp_path)["resources"]) > 3, "nothing was taken away"


def test_a_cloud_that_must_be_asked_is_asked_beside_the_stack(fourth: str, engine_env: None, tmp_path: Path) -> None:
    values = {"torchrec-cloud:cloud": fourth, "fourth:region": "north-1"}
    configured = configuration.Configuration("torchrec-cloud", "x", values).parse_leniently()
    assert account.current(configured, {}, Engine(print)) == "fourth-account"
    assert not list((tmp_path / "states").iterdir()), "neither the stack nor its lock is touched"


def test_the_policy_pack_stops_a_preview_in_the_real_engine(project: Path) -> None:
    bad = {"metadata": {"namespace": "training"}, "spec": {"hostNetwork": True, "containers": [{"image": "a:b"}]}}
    component = f"\npulumi.ComponentResource('kubernetes:core/v1:Pod', 'bad', {bad!r})\n"
    (project / "__main__.py").write_text("import pulumi\n" + component)
    shown = infra(project, "preview", "--policy-pack")
    assert shown.returncode == 2, shown.stderr
    assert "kubernetes:core/v1:Pod bad: no-privileged-pods" in shown.stderr
    assert "images-by-digest" in shown.stderr
    rules = project / "rules.json"
    rules.write_text(json.dumps({"no-privileged-pods": "disabled", "images-by-digest": {"exceptions": ["a:*"]}}))
    shown = infra(project, "preview", "--policy-pack", "--policy-config", str(rules))
    assert shown.returncode == 0, shown.stderr


def test_the_readmes_script_runs(project: Path, tmp_path: Path) -> None:
    """The very lines of the README, in a copy of the repository whose program needs no cluster."""
    (script,) = re.findall(r"```python\n(from infra\.automation.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(script.splitlines()) <= 15
    shutil.copytree(ROOT / "infra", project / "infra", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "script.py").write_text(script)
    shown = subprocess.run(
        [sys.executable, "script.py"], cwd=project, capture_output=True, text=True, check=False, timeout=300
    )
    assert shown.returncode == 0, shown.stderr
    assert "file:///data/work/checkpoints" in shown.stdout
    found = state(project, tmp_path)
    assert [item for item in found.get("resources") or [] if item.get("custom")] == [], "the script ends with destroy"


def test_the_clouds_that_must_be_asked_are_those_whose_credentials_lead_anywhere() -> None:
    assert {name for name in clouds.available() if clouds.load(name).asks_for_account} == {"aws", "azure"}
