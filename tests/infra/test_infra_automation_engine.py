"""The verbs with the real engine, on a small program whose resources a test can fail, delay or interrupt."""

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

#: Three resources in sequence, the last reads `job.run`; a file in the program's folder makes the second fail or wait.
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
    """Return the folder for the engine's own files."""
    return tmp_path_factory.mktemp("pulumi")


@pytest.fixture
def engine_env(home: Path, tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own state backend, without the user's login."""
    (tmp_path / "states").mkdir()
    for name in [name for name in os.environ if name.startswith("PULUMI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PULUMI_HOME", str(home))
    monkeypatch.setenv("PULUMI_BACKEND_URL", (tmp_path / "states").as_uri())
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "right")
    monkeypatch.setenv("PULUMI_SKIP_UPDATE_CHECK", "1")


@pytest.fixture
def project(tmp_path: Path, engine_env: None) -> Path:
    """Create a project with the settings of stack `local` and the small program."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("Pulumi.yaml", "Pulumi.local.yaml"):
        shutil.copy(ROOT / name, folder)
    (folder / "__main__.py").write_text(PROGRAM)
    (folder / ".venv").symlink_to(sys.prefix)  # Pulumi.yaml names it
    return folder


def open_stack(project: Path, settings: Mapping[str, object] | None = None, **options: Any) -> LiveStack:
    return LiveStack("local", settings, folder=project, display=Silent(), **options)


def infra(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m infra ...` as a user would."""
    command = [sys.executable, "-m", "infra", words[0], "--stack", "local", "--cwd", str(project), *words[1:]]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def state(project: Path, tmp_path: Path) -> dict[str, Any]:
    """Read the stack's state from the backend."""
    (path,) = (tmp_path / "states").rglob("stacks/**/local.json")
    found: dict[str, Any] = json.loads(path.read_text())["checkpoint"]["latest"]
    return found


def test_a_stack_is_created_updated_and_destroyed(project: Path, tmp_path: Path) -> None:
    stack = open_stack(project)
    assert stack.preview().counts == {"create": 3}
    outputs = stack.up()
    assert outputs.cluster_name == "laptop"
    assert outputs.kubeconfig == "very secret"
    assert outputs.job == {"run": "default"}
    assert "very secret" not in (next((tmp_path / "states").rglob("stacks/**/local.json"))).read_text()

    before = (project / "Pulumi.local.yaml").read_text()
    assert open_stack(project, {"job.run": "other"}).preview().counts == {"update": 1}
    assert (project / "Pulumi.local.yaml").read_text() == before, "a preview does not keep its settings"
    assert open_stack(project, {"job.run": "other"}).up().job == {"run": "other"}
    assert "run: other" in (project / "Pulumi.local.yaml").read_text(), "otherwise the next `up` would undo it"
    assert not list(project.glob(".Pulumi.*")), "the temporary copy is deleted"

    unchanged = open_stack(project).preview()
    assert not unchanged
    assert unchanged.num_unchanged == 3
    open_stack(project).refresh()
    assert open_stack(project).destroy().counts == {"deleted": 3}
    assert not [item for item in state(project, tmp_path).get("resources") or [] if item.get("custom")]


def test_a_failed_resource_is_reported_with_what_remains_and_what_to_run_next(project: Path, tmp_path: Path) -> None:
    (project / "fail").touch()
    shown = infra(project, "up", "--yes")
    assert shown.returncode == 1
    lines = shown.stderr[shown.stderr.index("error: ") :].splitlines()
    assert lines[0] == "error: pulumi-python:dynamic:Resource second: QuotaExceeded: no more of these"
    assert lines[1].strip() == "remaining: 1 resources in the state"
    assert lines[2].strip().startswith("fix the cause, then: python -m infra up --stack local")
    assert "Traceback" not in shown.stderr
    assert re.search(r"^created +pulumi-python:dynamic:Resource  first  \d+\.\d s$", shown.stderr, re.MULTILINE)
    (project / "fail").unlink()
    assert open_stack(project).up().cluster_name == "laptop", (
        "the first resource is kept, and the others are created now"
    )


def test_ctrl_c_finishes_the_running_step_and_leaves_a_usable_state(project: Path, tmp_path: Path) -> None:
    (project / "wait").touch()
    process, errors = _start_up(project)
    process.send_signal(signal.SIGINT)
    _wait_for(lambda: "cancelling" in errors.read_text(), process)
    (project / "wait").unlink()
    assert process.wait(timeout=120) == 130
    text = errors.read_text()
    assert "was cancelled" in text
    assert "to continue: python -m infra up --stack local" in text
    assert "Traceback" not in text
    found = state(project, tmp_path)
    assert not found.get("pending_operations")
    assert not list((tmp_path / "states").rglob("locks/**/*.json")), "the lock is released"
    assert open_stack(project).up().cluster_name == "laptop"


def test_a_second_ctrl_c_stops_at_once_and_a_refresh_repairs_the_state(project: Path, tmp_path: Path) -> None:
    (project / "wait").touch()
    process, errors = _start_up(project)
    process.send_signal(signal.SIGINT)
    _wait_for(lambda: "cancelling" in errors.read_text(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, "the running step would take a minute"
    assert "stopping at once" in errors.read_text()
    (project / "wait").unlink()
    if list((tmp_path / "states").rglob("locks/**/*.json")):
        subprocess.run(["pulumi", "cancel", "--yes", "--stack", "local"], cwd=project, check=True, capture_output=True)
    shown = infra(project, "refresh")
    assert shown.returncode == 0, shown.stderr
    assert not state(project, tmp_path).get("pending_operations")
    assert open_stack(project).up().cluster_name == "laptop"


def _start_up(project: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start an `up`, wait until it creates its second resource, and return it with the file of its progress."""
    errors = project / "stderr.txt"
    command = [sys.executable, "-m", "infra", "up", "--stack", "local", "--cwd", str(project), "--yes"]
    with errors.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stream, stdout=subprocess.DEVNULL)
    _wait_for((project / "waiting").exists, process)
    return process, errors


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for a condition, and fail if the process ends before it is met."""
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "the process ended early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_locked_stack_is_reported_with_its_holder_and_the_fix(project: Path, tmp_path: Path) -> None:
    subprocess.run(["pulumi", "stack", "init", "local"], cwd=project, check=True, capture_output=True)
    locks = tmp_path / "states" / ".pulumi" / "locks" / "organization" / "torchrec-cloud" / "local"
    locks.mkdir(parents=True, exist_ok=True)
    holder = {"pid": 28211, "username": "ann", "hostname": "laptop", "timestamp": "2026-11-21T15:24:37Z"}
    (locks / "0a2af24d-369c-47b5-a875-878cd5e06022.json").write_text(json.dumps(holder))
    shown = infra(project, "up", "--yes")
    assert shown.returncode == 2
    assert "locked by ann@laptop (pid 28211)" in shown.stderr
    assert "pulumi cancel --stack local" in shown.stderr


def test_a_stack_that_cannot_be_opened_is_reported_in_one_line(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OperationError, match="no such stack: got 'local'; existing: none; with a settings file: local"):
        open_stack(project).destroy()
    subprocess.run(["pulumi", "stack", "init", "local"], cwd=project, check=True, capture_output=True)
    with pytest.raises(OperationError, match="no such stack: got 'nope'; existing: local"):
        LiveStack("nope", folder=project, display=Silent()).up()
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "wrong")
    with pytest.raises(OperationError, match="wrong passphrase"):
        open_stack(project).preview()
    monkeypatch.delenv("PULUMI_BACKEND_URL")
    with pytest.raises(OperationError, match="pulumi login --local"):
        open_stack(project).preview()


def test_an_invalid_set_option_changes_neither_file_nor_state(project: Path, tmp_path: Path) -> None:
    before = (project / "Pulumi.local.yaml").read_text()
    shown = infra(project, "up", "--yes", "--set", "gpu.nodez=3")
    assert shown.returncode == 2
    assert "gpu.nodez" in shown.stderr
    assert (project / "Pulumi.local.yaml").read_text() == before
    assert not list((tmp_path / "states").rglob("local.json"))


def test_plain_pulumi_shows_an_invalid_setting_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "__main__.py", project)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for words in (["stack", "init", "local"], ["config", "set", "--path", "gpu.nodez", "3"]):
        subprocess.run(["pulumi", *words], cwd=project, check=True, capture_output=True)
    shown = subprocess.run(
        ["pulumi", "preview", "--color", "never"], cwd=project, check=False, capture_output=True, text=True
    )
    assert shown.returncode != 0
    text = shown.stdout + shown.stderr
    assert "gpu.nodez" in text
    assert "unhandled error" not in text, "a second error after the program's own hides it"


def test_an_error_of_the_program_is_reported_in_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = "import pulumi\nfrom infra.interrupt import report_errors_once\n"
    program += "with report_errors_once():\n    raise pulumi.RunError('the zone is full. Fix: choose another')\n"
    (project / "__main__.py").write_text(program)
    with pytest.raises(OperationError) as error:
        open_stack(project).up()
    assert str(error.value).startswith("up of stack 'local': the zone is full. Fix: choose another")
    assert "\n" not in str(error.value)


def test_credentials_of_another_account_cannot_destroy_a_stack(
    project: Path, tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_stack(project).up()
    other = tmp_path / "other-kubeconfig"
    other.write_text(kubeconfig.read_text().replace("6443", "7777"))
    monkeypatch.setenv("KUBECONFIG", str(other))
    shown = infra(project, "destroy", "--yes")
    assert shown.returncode == 2
    assert "https://127.0.0.1:6443" in shown.stderr
    assert "https://127.0.0.1:7777" in shown.stderr
    assert len(state(project, tmp_path)["resources"]) > 3, "no resource was deleted"


def test_the_account_is_queried_without_using_the_stack(fourth: str, engine_env: None, tmp_path: Path) -> None:
    values = {"torchrec-cloud:cloud": fourth, "fourth:region": "north-1"}
    configured = configuration.Configuration("torchrec-cloud", "x", values).parse_leniently()
    assert account.find_account(configured, {}, Engine(print)) == "fourth-account"
    assert not list((tmp_path / "states").iterdir()), "neither the stack nor its lock is used"


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


def test_the_script_in_the_guide_runs(project: Path, tmp_path: Path) -> None:
    """Run the script of infra/README.md in a copy of the repository whose program needs no cluster."""
    (script,) = re.findall(
        r"```python\n(from infra\.automation.*?)```", (ROOT / "infra" / "README.md").read_text(), re.DOTALL
    )
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


def test_the_account_is_queried_on_clouds_whose_credentials_do_not_name_it() -> None:
    assert {name for name in clouds.available() if clouds.load(name).asks_for_account} == {"aws", "azure"}


def test_a_tunnel_before_the_first_up_is_answered_with_up(project: Path) -> None:
    fix = "Fix: python -m infra up --stack local"
    with pytest.raises(OperationError, match=f"stack 'local' is not up yet.*{fix}"):
        open_stack(project).hold_tunnel(print)
    subprocess.run(["pulumi", "stack", "init", "local"], cwd=project, check=True, capture_output=True)
    with pytest.raises(OperationError, match=f"stack 'local' is not up yet.*{fix}"):
        open_stack(project).hold_tunnel(print)


def test_a_tunnel_to_an_api_that_needs_none_is_answered_with_the_doctor(project: Path) -> None:
    open_stack(project).up()
    with pytest.raises(OperationError, match=r"is reached without a tunnel.*Fix: python -m infra doctor --stack local"):
        open_stack(project).hold_tunnel(print)


@pytest.mark.parametrize("verb", ["preview", "up"])
def test_a_stack_whose_api_could_not_be_reached_is_refused_before_it_is_created(
    project: Path, tmp_path: Path, verb: str
) -> None:
    shutil.copy(ROOT / "Pulumi.aws.yaml", project)
    with pytest.raises(OperationError, match=r"network\.authorized_cidrs is empty"):
        getattr(LiveStack("aws", folder=project, display=Silent()), verb)()
    assert not list((tmp_path / "states").rglob("aws.json")), "the stack would stay in the backend"
