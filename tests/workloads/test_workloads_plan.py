"""`python -m workloads plan`: the stack's file and the catalog become a priced plan, and nothing is provisioned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra import catalog
from workloads import plan
from workloads.__main__ import main
from workloads.plan import ROOT, Wanted, costs, epoch_samples, stack_keys

pytest.importorskip("torchrec", reason="the planner is TorchRec's: make install-trainer-cpu")


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stack files in place of the repository's."""
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    monkeypatch.setattr(plan.stack_keys, "__defaults__", (tmp_path,))
    return tmp_path


def write(folder: Path, text: str, name: str = "lab") -> None:
    (folder / f"Pulumi.{name}.yaml").write_text(text)


SMALL = """
config:
  torchrec-cloud:cloud: aws
  torchrec-cloud:gpu: {instance_type: p4d.24xlarge, nodes: {desired: 2, max: 2}, capacity: on_demand}
  torchrec-cloud:job: {run: x}
  torchrec-cloud:trainer:
    train: {batch_size: 65536}
    sharding: {types: [table_wise]}
"""


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", "--json", *words]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_stacks_file_is_planned_and_priced(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(stacks, SMALL)
    found = asked(capsys, "--stack", "lab")
    row = catalog.instance("aws", "p4d.24xlarge")
    assert found["hardware"] == "2 x p4d.24xlarge (8 A100 40GB)"
    assert (found["processes"], found["batch_size"]) == (16, 65_536)
    cost = found["cost"]
    assert cost["usd_per_hour"] == pytest.approx(2 * row.on_demand_usd_per_hour)
    assert cost["epoch_samples"] == 819_200
    hours = 819_200 / found["samples_per_second"] / 3600
    assert cost["usd_per_epoch"] == pytest.approx(cost["usd_per_hour"] * hours)


def test_options_come_before_the_stacks_file(stacks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(stacks, SMALL)
    config = tmp_path / "model.toml"
    config.write_text("[train]\nbatch_size = 32768\n")
    words = ["--instance-type", "p5.48xlarge", "--nodes", "1", "--config", str(config)]
    found = asked(capsys, "--stack", "lab", *words)
    assert (found["processes"], found["batch_size"]) == (8, 32_768)
    assert "p5.48xlarge" in str(found["hardware"])


def test_a_model_that_does_not_fit_is_refused_with_what_would_help(
    stacks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = SMALL.replace("sharding:", "model: {num_embeddings: 400000000}\n    sharding:")
    write(stacks, big)
    assert main(["plan", "--stack", "lab"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "2 x p4d.24xlarge: no sharding plan fits 16 processes" in told.err
    assert "the tables have 2,479.6 GiB" in told.err
    assert "use more nodes" in told.err
    assert told.err.count("\n") == 1


def test_the_table_for_people_names_the_limit_and_the_price(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(stacks, SMALL)
    assert main(["plan", "--stack", "lab"]) == 0
    shown = capsys.readouterr().out
    for part in ("limited by", "bytes per rank", "bound of HBM", "bound of fabric", "43.92 USD"):
        assert part in shown


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (SMALL, [], "give --stack S, or --instance-type T --nodes N"),
        (SMALL, ["--stack", "lba"], "no Pulumi.lba.yaml; there are the stacks lab"),
        ("config: [", ["--stack", "lab"], "is not YAML of a stack"),
        (SMALL, ["--instance-type", "p9", "--nodes", "2"], "no instance type 'p9' in the catalog; legal: p4d.24xlarge"),
        (SMALL.replace("run: x", "run: X"), ["--stack", "lab"], "job.run = 'X'"),
        (SMALL.replace("batch_size: 65536", "batch_siz: 1"), ["--stack", "lab"], "trainer.train.batch_siz"),
        (
            SMALL.replace("65536", "65537"),
            ["--stack", "lab"],
            "train.batch_size does not divide by 16 processes: got 65537",
        ),
        (SMALL.replace("run: x", "gpus_per_node: 9"), ["--stack", "lab"], "job.gpus_per_node is 9; p4d.24xlarge has 8"),
        (SMALL.replace("instance_type: p4d.24xlarge, ", ""), ["--stack", "lab"], "gpu.instance_type is missing"),
        (SMALL, ["--stack", "lab", "--config", "/nowhere.json"], "--config /nowhere.json"),
        (SMALL, ["--stack", "lab", "--config", "x.txt"], "legal: .json, .toml, .yaml, .yml"),
    ],
    ids=["nothing", "stack", "yaml", "type", "run", "key", "batch", "gpus", "no type", "no file", "ending"],
)
def test_a_mistake_is_one_line(
    stacks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: list[str],
    told: str,
) -> None:
    write(stacks, text)
    (tmp_path / "x.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("stack", ["aws", "azure", "gcp", "local"])
def test_the_repositorys_own_stacks_can_be_read(stack: str) -> None:
    arguments = _arguments("--stack", stack)
    wanted = plan.read(arguments)
    assert wanted.nodes == 2
    assert (wanted.instance is None) == (stack == "local"), "local has no instance type"
    assert stack_keys(stack, ROOT)["cloud"] == stack


def _arguments(*words: str) -> object:
    from workloads.__main__ import _parser

    return _parser().parse_args(["plan", *words])


def test_a_pool_without_gpus_is_measured_here(
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
    found = asked(capsys, "--stack", "lab")
    assert found["processes"] == 1
    assert found["samples_per_second"] > 0
    assert found["cost"]["usd_per_hour"] is None, "this project does not know what a person's own machine costs"


def test_spot_pools_cost_the_spot_price() -> None:
    from trainer.config import TrainConfig

    row = catalog.instance("aws", "p5.48xlarge")
    config = TrainConfig()
    spot = costs(Wanted(row, 3, 8, config, spot=True), 1e6)
    assert spot["usd_per_hour"] == pytest.approx(3 * row.spot_usd_per_hour)
    assert spot["usd_per_billion_samples"] == pytest.approx(3 * row.spot_usd_per_hour * 1000 / 3600)
    unknown = costs(Wanted(catalog.instance("aws", "p4d.24xlarge"), 3, 8, config, spot=True), 1e6)
    assert unknown["usd_per_hour"] is None, "no spot price is made up"


def test_an_epoch_is_as_long_as_the_data_is_known_to_be() -> None:
    from trainer.config import TrainConfig

    criteo = {"data": {"source": "criteo", "path": "/d"}, "model": {"num_embeddings": "criteo-1tb"}}
    assert epoch_samples(TrainConfig.model_validate(criteo)) == 4_195_197_692
    parquet = {"data": {"source": "parquet", "path": "/d", "parquet": {"sparse": ["a"], "dense": ["b"]}}}
    assert epoch_samples(TrainConfig.model_validate(parquet)) is None, "the files have not been read"


@pytest.mark.parametrize(
    ("cloud", "instance_type", "launcher", "usd_per_hour"),
    [("gcp", "a2-highgpu-8g", "vertex", 2 * 29.387), ("azure", "Standard_ND96asr_v4", "azureml", 2 * 27.197)],
)
def test_a_job_on_a_training_service_is_planned_like_any_other(
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
