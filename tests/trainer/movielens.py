"""Convert MovieLens-100K to Parquet and measure a linear model on it: `python tests/trainer/movielens.py OUT_DIR`.

The data is part of the recbole package. Its licence forbids redistribution, so it is downloaded on demand, verified by
its hash, and kept in a cache folder outside of this repository.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REQUIREMENT = "recbole==1.2.1 --hash=sha256:9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
SPLIT_SEED, EVAL_SHARE = 100, 0.2
LIKED = 4  # ratings of 4 and 5 are positive labels
USER_TEXT = {"gender": "gender", "occupation": "occupation", "zip": "zip_code"}
ONE_HOT = ("user", "item", "age", "year", *USER_TEXT)
INVERSE_REGULARISATIONS = (0.5, 1.0, 2.0)


class RegistryUnreachableError(RuntimeError):
    """The package with the data cannot be downloaded."""


def download() -> Path:
    """Return the folder with the original tables, which are downloaded the first time and cached."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrec-cloud"
    folder = root / "movielens-100k"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            _install(Path(scratch))
            tables = Path(scratch) / "tables"
            tables.mkdir()
            for name in FILES:
                shutil.copy(Path(scratch) / "package/recbole/dataset_example/ml-100k" / name, tables)
            try:
                tables.rename(folder)
            except OSError:
                assert folder.is_dir(), "the folder was not created by another process either"
    return folder


def _install(scratch: Path) -> None:
    """Unpack the package into scratch/package without running it; the installer verifies the hash."""
    (scratch / "requirements.txt").write_text(REQUIREMENT + "\n")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(scratch / "package")]
    command = [*_installer(), *options, "-r", str(scratch / "requirements.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RegistryUnreachableError(f"{' '.join(command[:4])} .. recbole failed: {last}")


def _installer() -> list[str]:
    for module, words in {"pip": ["pip", "install"], "uv": ["uv", "pip", "install"]}.items():
        if importlib.util.find_spec(module):
            return [sys.executable, "-m", *words]
    program = shutil.which("uv") or shutil.which("pip3")
    if program is None:
        raise RegistryUnreachableError("neither pip nor uv is installed to download recbole")
    return [program, "pip", "install"] if Path(program).name == "uv" else [program, "install"]


def join_tables(folder: Path) -> pa.Table:
    """Return one row per rating, in the original order: label, timestamp, and the columns of user and item."""
    ratings, users, items = (_read(folder / name) for name in FILES)
    user_row = {user: row for row, user in enumerate(users["user_id"])}
    item_row = {item: row for row, item in enumerate(items["item_id"])}
    of_user = [user_row[user] for user in ratings["user_id"]]
    of_item = [item_row[item] for item in ratings["item_id"]]
    years = [int(year) if year.isdigit() else None for year in items["release_year"]]
    genres = [text.split() for text in items["class"]]
    return pa.table(
        {
            "label": [float(rating) >= LIKED for rating in ratings["rating"]],
            "timestamp": [int(float(seconds)) for seconds in ratings["timestamp"]],
            "user": [int(user) for user in ratings["user_id"]],
            "item": [int(item) for item in ratings["item_id"]],
            "age": [int(users["age"][row]) for row in of_user],
            **{name: [users[column][row] for row in of_user] for name, column in USER_TEXT.items()},
            "year": pa.array([years[row] for row in of_item], pa.int64()),
            "genres": [genres[row] for row in of_item],
        }
    )


def _read(path: Path) -> dict[str, list[str]]:
    """Read the columns of a tab-separated table; a column name such as `age:token` becomes `age`."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    columns = zip(*(line.split("\t") for line in lines), strict=True)
    return {name.split(":")[0]: list(values) for name, values in zip(head.split("\t"), columns, strict=True)}


def convert(folder: Path, out: Path) -> tuple[Path, Path]:
    """Write out/train.parquet and out/eval.parquet, a fixed random split of 80 to 20, and return their paths."""
    table = join_tables(folder)
    order = np.random.default_rng(SPLIT_SEED).permutation(table.num_rows)
    cut = round(table.num_rows * (1 - EVAL_SHARE))
    out.mkdir(parents=True, exist_ok=True)
    paths = out / "train.parquet", out / "eval.parquet"
    for path, rows in zip(paths, (order[:cut], order[cut:]), strict=True):
        pq.write_table(table.take(rows), path, row_group_size=20_000)
    return paths


def linear_auc(train_path: Path, eval_path: Path) -> float:
    """Return the held-out AUC of logistic regression on the same features, with the best of a few regularisations.

    The regularisation is chosen on the held-out rows, which favours this model.
    """
    from sklearn.feature_extraction import DictVectorizer  # type: ignore[import-untyped]
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

    train, held_out = pq.read_table(train_path), pq.read_table(eval_path)
    vectorizer = DictVectorizer()
    x_train, x_eval = vectorizer.fit_transform(_one_hot(train)), vectorizer.transform(_one_hot(held_out))
    y_train, y_eval = (table["label"].to_numpy() for table in (train, held_out))
    aucs = []
    for inverse in INVERSE_REGULARISATIONS:
        model = LogisticRegression(C=inverse, max_iter=1_000).fit(x_train, y_train)
        aucs.append(float(roc_auc_score(y_eval, model.decision_function(x_eval))))
    return max(aucs)


def _one_hot(table: pa.Table) -> Iterator[dict[str, float]]:
    """Yield each row as features: 1 for each of its categories, a standardised number for time and age."""
    columns = table.to_pydict()
    for row in range(table.num_rows):
        features = {f"{name}={columns[name][row]}": 1.0 for name in ONE_HOT}
        features |= {f"genre={genre}": 1.0 for genre in columns["genres"][row]}
        features |= {"timestamp": (columns["timestamp"][row] - 8.835e8) / 5.343e6, "age": columns["age"][row] / 11.6}
        yield features


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert MovieLens-100K to Parquet.")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="where train.parquet and eval.parquet go")
    print("wrote", *convert(download(), parser.parse_args().folder))  # noqa: T201
