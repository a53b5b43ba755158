"""Real data end to end: MovieLens-100K as Parquet, trained on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import movielens
import pyarrow.parquet as pq
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 0.005  # AUC; with six seeds the trained model was 0.003 to 0.009 above the linear one


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the Parquet files for training and evaluation."""
    try:
        tables = movielens.download()
    except movielens.RegistryUnreachableError as error:
        pytest.skip(f"MovieLens-100K cannot be downloaded: {error}")
    return movielens.convert(tables, tmp_path_factory.mktemp("movielens"))


def test_the_split_contains_every_rating_once(split: tuple[Path, Path]) -> None:
    train, held_out = (pq.read_table(path) for path in split)
    assert (train.num_rows, held_out.num_rows) == (80_000, 20_000)
    pairs = [set(zip(table["user"].to_pylist(), table["item"].to_pylist(), strict=True)) for table in (train, held_out)]
    assert (len(pairs[0]), len(pairs[1])) == (80_000, 20_000), "a user rates a film once"
    assert not pairs[0] & pairs[1], "a rating is in both"


def test_one_epoch_on_real_data_predicts_who_likes_which_film(split: tuple[Path, Path], tmp_path: Path) -> None:
    assert train_on_two_processes(*split, tmp_path, epochs=1) > 0.75, "it was 0.769 when this was written"


@pytest.mark.long
def test_training_on_real_data_is_as_good_as_logistic_regression(
    split: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auc = train_on_two_processes(*split, tmp_path, epochs=4)
    linear = movielens.linear_auc(*split)
    with capsys.disabled():
        print(f"\nheld-out AUC on MovieLens-100K: trainer {auc:.4f}, logistic regression {linear:.4f}")  # noqa: T201
    assert auc >= linear - TOLERANCE


def train_on_two_processes(train: Path, held_out: Path, folder: Path, epochs: int) -> float:
    """Train and return the AUC of the run's result event."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--log-dir", str(folder / "workers")]
    options = {
        "config": str(Path(movielens.__file__).with_suffix(".toml")),
        "data.path": str(train),
        "data.eval-path": str(held_out),
        "checkpoint.uri": str(folder / "runs"),
        "train.run": "movielens",
        "train.device": "cpu",
        "train.num-threads": "1",
        "train.epochs": str(epochs),
        "metrics.tensorboard": "false",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", *launcher, "-m", "trainer", "train", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
    lines = (folder / "runs" / "movielens" / "metrics.jsonl").read_text().splitlines()
    result = json.loads(lines[-1])
    assert result["event"] == "result"
    return float(result["auc"])
