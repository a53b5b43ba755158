"""`python -m workloads plan`: a plan with its cost from a stack's file and the catalog."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import catalog
from workloads import plan
from workloads.__main__ import main
from workloads.plan import ROOT, PlanRequest, compute_costs, epoch_samples, read_stack

pytest.importorskip("torchrec", reason="the planner is TorchRec's: make install-trainer-cpu")


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of stack files instead of the repository's, with the project's own Pulumi.yaml."""
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    monkeypatch.setattr(plan.read_stack, "__defaults__", (tmp_path,))
    shutil.copy(PROJECT / "Pulumi.yaml", tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "lab") -> None:
    """Write the file of a stack."""
    (folder / f"Pulumi.{name}.yaml").write_text(text)


PROJECT = Path(__file__).resolve().parents[2]
SMALL = """
config:
  torchrec-cloud:cloud: aws
  torchrec-cloud:gpu: {instance_type: p4d.24xlarge, nodes: {desired: 2, max: 2}, capacity: on_demand}
  torchrec-cloud:job: {run: x}
  torchrec-cloud:trainer:
    train: {batch_size: 65536}
    sharding: {types: [table_wise]}
"""


def read_plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """Return the plan that the command prints as JSON."""
    assert main(["plan", "--json", *words]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_plan_of_a_stack_includes_its_cost(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(stacks, SMALL)
    found = read_plan(capsys, "--stack", "lab")
    row = catalog.instance("aws", "p4d.24xlarge")
    assert found["hardware"] == "2 x p4d.24xlarge (8 A100 40GB)"
    assert (found["processes"], found["batch_size"]) == (16, 65_536)
    cost = found["cost"]
    assert cost["usd_per_hour"] == pytest.approx(2 * row.on_demand_usd_per_hour)
    assert cost["epoch_samples"] == 819_200
    hours = 819_200 / found["samples_per_second"] / 3600
    assert cost["usd_per_epoch"] == pytest.approx(cost["usd_per_hour"] * hours)


def test_options_override_the_stacks_file(stacks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(stacks, SMALL)
    config = tmp_path / "model.toml"
    config.write_text("[train]\nbatch_size = 32768\n")
    words = ["--instance-type", "p5.48xlarge", "--nodes", "1", "--config", str(config)]
    found = read_plan(capsys, "--stack", "lab", *words)
    assert (found["processes"], found["batch_size"]) == (8, 32_768)
    assert "p5.48xlarge" in str(found["hardware"])


def test_a_model_that_does_not_fit_is_an_error_with_a_fix(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = SMALL.replace("sharding:", "model: {num_embeddings: 400000000}\n    sharding:")
    write(stacks, big)
    assert main(["plan", "--stack", "lab"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2 x p4d.24xlarge: no sharding plan fits 16 processes" in printed.err
    assert "the tables have 2,479.6 GiB" in printed.err
    assert "use more nodes" in printed.err
    assert printed.err.count("\n") == 1


def test_the_table_shows_the_limit_and_the_price(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(stacks, SMALL)
    assert main(["plan", "--stack", "lab"]) == 0
    shown = capsys.readouterr().out
    for part in ("limited by", "bytes per rank", "bound of HBM", "bound of fabric", "43.92 USD"):
        assert part in shown


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (SMALL, [], "pass --stack S, or --instance-type T --nodes N"),
        (SMALL, ["--stack", "lba"], "no Pulumi.lba.yaml: got 'lba'; allowed: lab. Fix: pulumi stack init lba"),
        ("config: [", ["--stack", "lab"], "Pulumi.lab.yaml is not YAML"),
        (SMALL, ["--instance-type", "p9", "--nodes", "2"], "no such instance type: got 'p9'; allowed: p4d.24xlarge"),
        (SMALL.replace("run: x", "run: X"), ["--stack", "lab"], "got 'X'"),
        (SMALL.replace("batch_size: 65536", "batch_siz: 1"), ["--stack", "lab"], "trainer.train.batch_siz"),
        (
            SMALL.replace("65536", "65537"),
            ["--stack", "lab"],
            "train.batch_size does not divide by 16 processes: got 65537",
        ),
        (
            SMALL.replace("run: x", "gpus_per_node: 9"),
            ["--stack", "lab"],
            "job.gpus_per_node is too large: got 9; allowed: 1 to 8 on p4d.24xlarge",
        ),
        (SMALL.replace("instance_type: p4d.24xlarge, ", ""), ["--stack", "lab"], "gpu.instance_type is missing"),
        (SMALL, ["--stack", "lab", "--config", "/nowhere.json"], "--config /nowhere.json"),
        (SMALL, ["--stack", "lab", "--config", "x.txt"], "allowed: .json, .toml, .yaml, .yml"),
    ],
    ids=["nothing", "stack", "yaml", "type", "run", "key", "batch", "gpus", "no type", "no file", "ending"],
)
def test_a_mistake_is_reported_in_one_line(
    stacks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: list[str],
    message: str,
) -> None:
    write(stacks, text)
    (tmp_path / "x.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("stack", ["aws", "azure", "gcp", "local"])
def test_the_stacks_of_the_repository_can_be_planned(stack: str) -> None:
    arguments = _arguments("--stack", stack)
    request = plan.read_request(arguments)
    assert request.nodes == 2
    assert (request.instance is None) == (stack == "local"), "local has no instance type"
    assert read_stack(stack, ROOT)["cloud"] == stack


def _arguments(*words: str) -> object:
    """Return the parsed options of the command."""
    from workloads.__main__ import _parser

    return _parser().parse_args(["plan", *words])


def test_a_pool_without_gpus_is_measured_on_this_machine(
    stacks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "ROOT", Path(__file__).resolve().parents[2])
    tiny = {"num_embeddings": 100, "embedding_dim": 8, "dense_arch": [8], "over_arch": [8, 1]}
    model = f"{{model: {json.dumps(tiny)}, train: {{batch_size: 64, num_threads: 1}}}}"
    write(
        stacks,
        f"config:\n  torchrec-cloud:cloud: local\n  torchrec-cloud:job: {{nodes: 1}}\n"
        f"  torchrec-cloud:trainer: {model}\n",
    )
    found = read_plan(capsys, "--stack", "lab")
    assert found["processes"] == 1
    assert found["samples_per_second"] > 0
    assert found["cost"]["usd_per_hour"] is None, "the cost of the user's own machine is unknown"


def test_a_spot_pool_costs_the_spot_price() -> None:
    from trainer.config import TrainConfig

    row = catalog.instance("aws", "p5.48xlarge")
    config = TrainConfig()
    spot = compute_costs(PlanRequest(row, 3, 8, config, spot=True), 1e6)
    assert spot["usd_per_hour"] == pytest.approx(3 * row.spot_usd_per_hour)
    assert spot["usd_per_billion_samples"] == pytest.approx(3 * row.spot_usd_per_hour * 1000 / 3600)
    unknown = compute_costs(PlanRequest(catalog.instance("aws", "p4d.24xlarge"), 3, 8, config, spot=True), 1e6)
    assert unknown["usd_per_hour"] is None, "a missing spot price is not guessed"


def test_the_length_of_an_epoch_is_known_for_some_sources_only() -> None:
    from trainer.config import TrainConfig

    criteo = {"data": {"source": "criteo", "path": "/d"}, "model": {"num_embeddings": "criteo-1tb"}}
    assert epoch_samples(TrainConfig.model_validate(criteo)) == 4_195_197_692
    parquet = {"data": {"source": "parquet", "path": "/d", "parquet": {"sparse": ["a"], "dense": ["b"]}}}
    assert epoch_samples(TrainConfig.model_validate(parquet)) is None, "the files have not been read"


@pytest.mark.parametrize(
    ("cloud", "instance_type", "launcher", "usd_per_hour"),
    [("gcp", "a2-highgpu-8g", "vertex", 2 * 29.387), ("azure", "Standard_ND96asr_v4", "azureml", 2 * 27.197)],
)
def test_a_job_on_a_training_service_is_planned_as_on_a_cluster(
    cloud: str,
    instance_type: str,
    launcher: str,
    usd_per_hour: float,
    stacks: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = SMALL.replace("cloud: aws", f"cloud: {cloud}").replace("p4d.24xlarge", instance_type)
    write(stacks, text.replace("{run: x}", f"{{run: x, launcher: {launcher}}}"))
    assert main(["plan", "--stack", "lab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["usd_per_hour"] == pytest.approx(usd_per_hour)


def test_defaults_of_pulumi_yaml_count(stacks: Path) -> None:
    defaults = "nodes: {desired: 2, max: 2}, "
    assert defaults in SMALL
    write(stacks, SMALL.replace(defaults, ""))
    project = yaml.safe_load((stacks / "Pulumi.yaml").read_text())
    project["config"]["gpu.nodes.desired"]["default"] = 5
    (stacks / "Pulumi.yaml").write_text(yaml.safe_dump(project))
    assert plan.read_request(_arguments("--stack", "lab")).nodes == 5
    write(stacks, SMALL)
    assert plan.read_request(_arguments("--stack", "lab")).nodes == 2, "the stack's file overrides the default"


@pytest.mark.parametrize("cloud", ["aws", "local"])
def test_a_missing_torch_names_the_make_target_that_installs_it(
    cloud: str, stacks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import, real_find = builtins.__import__, plan.find_spec

    def import_without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in ("torch", "torchrec"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("trainer.planning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", import_without_torch)
    monkeypatch.setattr(plan, "find_spec", lambda name: None if name == "torchrec" else real_find(name))
    write(stacks, SMALL if cloud == "aws" else "config: {torchrec-cloud:cloud: local}\n")
    assert main(["plan", "--stack", "lab"]) == 2
    error = capsys.readouterr().err
    assert "Fix: make install-trainer-cpu" in error
    assert error.count("\n") == 1
