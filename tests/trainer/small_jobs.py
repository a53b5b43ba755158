"""Jobs of a fraction of a second, in this process or in several, and helpers to inspect them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from trainer.checkpoint import Checkpointer, Progress, open_store
from trainer.config import TrainConfig
from trainer.config.options import validate
from trainer.data import SourceContext, open_source
from trainer.data.loader import train_batches
from trainer.main import main
from trainer.runtime.process_group import Runtime, init_runtime
from trainer.runtime.quiet import quiet_libraries
from trainer.sharding.optimizers import schedule_factor
from trainer.sharding.sharded_model import ShardedModel, build_sharded_model
from trainer.training.pipeline import Pipeline

quiet_libraries()

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ROWS = (50, 61, 70)
DIM = 8
TABLES = ("t_cat_0", "t_cat_1", "t_cat_2")
PLANS: dict[str, dict[str, Any]] = {
    "table_wise": {"sharding.types": ["table_wise"]},
    "row_wise": {"sharding.types": ["row_wise"]},
    "column_wise": {"sharding.types": ["column_wise"], "sharding.min_columns": 4},
    "data_parallel": {"sharding.types": ["data_parallel"]},
    "mixed": {
        "sharding.tables": {"t_cat_0": ["row_wise"], "t_cat_1": ["column_wise"], "t_cat_2": ["data_parallel"]},
        "sharding.min_columns": 4,
    },
}


def tiny_tree(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return options for three tables of about 60 x 8 on one CPU thread; `changes` maps dotted options to values."""
    tree: dict[str, Any] = {
        "data": {"num_dense": 4, "num_sparse": 3, "eval_samples": 256, "train_samples": 1024},
        "model": {"num_embeddings": list(ROWS), "embedding_dim": DIM, "dense_arch": [16, DIM], "over_arch": [16, 1]},
        "train": {"batch_size": 48, "steps": 4, "device": "cpu", "precision": "fp32", "num_threads": 1},
        "metrics": {"progress": "lines", "tensorboard": False, "log_every": 2},
    }
    for option, value in (changes or {}).items():
        *sections, name = option.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def tiny(changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of `tiny_tree`."""
    return validate(tiny_tree(changes))


@contextmanager
def alone(config: TrainConfig) -> Iterator[Runtime]:
    """Run a job of one process, in this process."""
    with torch_as_it_was(), init_runtime(config.train, {}) as runtime:
        yield runtime


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Restore torch's global switches, and end a process group that an error left."""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if dist.is_initialized():  # an error leaves the group, because a process of several could not end it alone
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.set_flush_denormal(False)


def steps(model: ShardedModel, count: int, start: Progress | None = None, total: int = 100) -> list[float]:
    """Train `count` steps from `start` and return the exact loss of each over the whole job."""
    config, runtime, start = model.config, model.runtime, start or Progress()
    source = open_source(SourceContext(config, "train", runtime.device))
    batches = train_batches(source, config, start.position, count, runtime.rank, runtime.world_size, runtime.device)
    model.dmp.train()
    pipeline = Pipeline(model)
    losses = []
    for step in range(start.step, start.step + count):
        model.optimizers.set_factor(schedule_factor(config.optim.schedule, step, total))
        loss, *_ = pipeline.progress(batches)
        mean = loss.double()
        dist.all_reduce(mean)
        losses.append(float(mean) / runtime.world_size)
    pipeline.detach()
    return losses


def after(config: TrainConfig, count: int) -> Progress:
    """Return the progress of a run after `count` steps."""
    return Progress(count, count * config.train.batch_size)


SCHEDULE = {"optim.schedule.decay": "cosine", "optim.schedule.warmup_steps": 3}


def config_of(folder: Path | str, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the run `given` with checkpoints under `folder` and a learning rate that changes in every step."""
    return tiny(SCHEDULE | {"checkpoint.uri": str(folder), "train.run": "given"} | dict(changes or {}))


def trained(config: TrainConfig, count: int = 5) -> dict[str, Any]:
    """Train and save in this process, and return the weights and the next losses."""
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        losses = steps(model, count)
        where = checkpointer(model).save(after(config, count))
        weights = full_weights(model)
        return {"where": where, "losses": losses, "weights": weights, "next": steps(model, 3, after(config, count))}


def first_steps(changes: Mapping[str, Any] | None = None, count: int = 4) -> list[float]:
    """Return the losses of a new job in this process."""
    config = tiny(changes)
    with alone(config) as runtime:
        return steps(build_sharded_model(config, runtime), count, total=count)


def full_weights(model: ShardedModel) -> dict[str, Tensor]:
    """Return all weights on every process, tables assembled by TorchRec's shard metadata. Collective."""
    found: dict[str, Tensor] = {}
    for name, value in model.dmp.state_dict().items():
        if isinstance(value, ShardedTensor):
            pieces: list[Any] = [None] * dist.get_world_size()
            mine = [(s.metadata.shard_offsets, s.tensor.detach().clone()) for s in value.local_shards()]
            dist.all_gather_object(pieces, mine)
            whole = torch.full(tuple(value.size()), float("nan"))
            for (row, col), piece in (shard for shards in pieces for shard in shards):
                whole[row : row + piece.shape[0], col : col + piece.shape[1]] = piece
            found[name] = whole
        else:
            found[name] = value.detach().clone()
    return found


def tables(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tables of `full_weights` by name."""
    return {name.rsplit(".", 2)[-2]: value for name, value in weights.items() if ".embedding_bags." in name}


def checkpointer(model: ShardedModel) -> Checkpointer:
    """Return the checkpointer of a model's run."""
    return Checkpointer(model, open_store(model.config.checkpoint.uri, model.config.train.run, model.config.checkpoint))


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit or that only one side has."""
    return sorted(k for k in {*left, *right} if k not in left or k not in right or not torch.equal(left[k], right[k]))


def logits(model: ShardedModel, count: int) -> Tensor:
    """Return the logits of the evaluation split's first `count` samples, the same on every process. Collective."""
    source = open_source(SourceContext(model.config, "eval", model.runtime.device))
    training = model.dmp.training
    model.dmp.eval()
    with torch.no_grad():
        _, (_, found, _, _) = model.dmp(source.read(0, count))
    model.dmp.train(training)
    return found.detach().clone()


def main_here(folder: Path, command: str, *options: str, changes: Mapping[str, Any] | None = None) -> int:
    """Run `python -m trainer COMMAND` for the run `a` under `folder` in this process, and return the exit code."""
    file = folder / "config.json"
    tree = tiny_tree({"checkpoint.uri": str(folder), "train.run": "a"} | dict(changes or {}))
    file.write_text(json.dumps(tree), encoding="utf-8")
    with torch_as_it_was():
        return main([command, "--config", str(file), *options])


# --- several processes -----------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without variables of a job or of pytest."""
    outer = ("TRAINER_", "TORCHELASTIC_", "PET_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(outer) and k not in names}
    folders = os.pathsep.join([str(ROOT), str(HERE)])
    return kept | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"} | more


def bounded(
    command: list[str], seconds: int = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new session; if it hangs, end all its processes and fail the test."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**(env or {})),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)} hung for {seconds} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def trainer(
    *arguments: str, seconds: int = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m trainer ARGUMENTS`."""
    return bounded([sys.executable, "-m", "trainer", *arguments], seconds, env)


def run_workers(name: str, processes: int, folder: Path, *arguments: str) -> Path:
    """Run tests/trainer/workers/<name>.py in a job and return its results folder; a failure shows every log."""
    logs, results = folder / "logs", folder / "results"
    results.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    kept = ["--log-dir", str(logs), "--redirects", "3"]
    command = [sys.executable, *launcher, *kept, str(HERE / "workers" / f"{name}.py"), str(results), *arguments]
    done = bounded(command)
    if done.returncode:
        shown = [f"--- {log.relative_to(logs)}\n{log.read_text()[-4000:]}" for log in sorted(logs.rglob("*.log"))]
        raise AssertionError("\n".join([f"workers {name} ended with {done.returncode}", done.stderr[-2000:], *shown]))
    return results
