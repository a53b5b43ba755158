"""`python -m trainer plan`: the work of a step, counted by hand, and what the command says."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from small_jobs import tiny_tree, trainer

from trainer.config import TrainConfig
from trainer.config.options import validate
from trainer.main import main
from trainer.planning import roofline as bounds
from trainer.planning.roofline import Pool, Rates, Shard, Work

PAPER = [
    "plan", "--nodes", "2", "--gpus-per-node", "8", "--gpu", "A100 40GB", "--hbm-gib", "40",
    "--hbm-gb-per-second", "1555", "--nvlink-gb-per-second", "600", "--network-gbps", "400",
]  # fmt: skip


def config(**data: object) -> TrainConfig:
    return validate({"data": {"num_sparse": 26, **data}, "train": {"batch_size": 4096}})


def test_the_flops_of_the_default_model_are_those_counted_by_hand() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 64
    top = 415 * 512 + 512 * 256 + 256
    model = validate({"model": {"over_arch": [512, 256, 1]}})
    assert bounds.flops_per_sample(model) == 6 * (bottom + 27 * 27 * 64 + top)


def test_the_dense_parameters_are_those_of_the_model_itself() -> None:
    pytest.importorskip("torch")
    from trainer.model.dlrm import build_model

    for changes in ({"model.interaction": "dot"}, {"model.interaction": "dcn", "model.dcn_low_rank_dim": 4}):
        small = validate(tiny_tree(changes))
        model = build_model(small, "fp32")
        dense = sum(p.numel() for name, p in model.named_parameters() if "embedding_bags" not in name)
        assert bounds.dense_parameters(small) == dense


def test_the_traffic_of_a_table_is_the_row_three_times_and_the_output_twice() -> None:
    shard = Shard("table_wise", 0, 100_000, 64)
    row = 64 * 4
    assert bounds.embedding_bytes(config(), [shard], 2) == 4096 * (3 * row + 8 + 8 + 2 * row)
    two_ids = bounds.embedding_bytes(config(ids_per_feature=2), [shard], 2)
    assert two_ids == 4096 * (2 * (3 * row + 8 + 8) + 2 * row)


def test_row_wise_lookups_are_shared_and_its_outputs_are_not() -> None:
    shard, row = Shard("row_wise", 0, 50_000, 64), 64 * 4
    assert bounds.embedding_bytes(config(), [shard], 2) == 2048 * (3 * row + 8 + 8) + 4096 * 2 * row


def test_what_leaves_a_process_by_all_to_all() -> None:
    mine, other = Shard("table_wise", 0, 10, 64), Shard("table_wise", 1, 10, 64)
    row = 64 * 4
    assert bounds.all_to_all_bytes(config(), [mine], 0, 2) == 2048 * row, "vectors for the other process's half"
    assert bounds.all_to_all_bytes(config(), [other], 0, 2) == 2048 * (row + 8 + 4), "gradients, ids and lengths"
    assert bounds.all_to_all_bytes(config(), [mine, other], 0, 1 + 1) == 2048 * (2 * row + 12)
    assert bounds.all_to_all_bytes(config(), [Shard("data_parallel", 0, 10, 64)], 0, 2) == 0


def test_fewer_bits_on_the_wire_are_fewer_bytes() -> None:
    half = validate({"sharding": {"forward_precision": "fp16"}, "train": {"batch_size": 4096}})
    shard = Shard("table_wise", 0, 10, 64)
    assert bounds.all_to_all_bytes(half, [shard], 0, 2) * 2 == bounds.all_to_all_bytes(config(), [shard], 0, 2)


def test_a_data_parallel_table_is_reduced_with_the_dense_part() -> None:
    shards = [Shard("data_parallel", rank, 1000, 64) for rank in (0, 1)]
    work = bounds.step_work(config(), shards, 2, "fp32")
    assert work.all_reduce_bytes == 4 * (bounds.dense_parameters(config()) + 64_000)
    assert bounds.step_work(config(), shards[:1], 1, "fp32").all_reduce_bytes == 0, "nobody to share with"


def test_the_input_of_a_sample_is_576_bytes() -> None:
    assert bounds.input_bytes_per_sample(config(ids_per_feature=2)) == 576


def test_bytes_per_rank_hold_weights_and_optimizer_state() -> None:
    dense = bounds.dense_parameters(config()) * 4 * 3
    shards = [Shard("table_wise", 0, 1000, 64)]
    assert bounds.bytes_per_rank(config(), shards, 2) == [dense + 1000 * (64 * 4 + 4), dense]


POOL = Pool(2, 8, 40, 1555, 600, 400, 312, 25)


def test_between_nodes_the_shared_network_limits_the_exchange() -> None:
    rates = bounds.peak_rates(POOL)
    assert rates.exchange == pytest.approx(50e9 / (8 / 15 * 8)), (
        "8 of 15 partners are behind 400 Gbps that 8 GPUs share"
    )
    assert rates.reduce == pytest.approx(50e9), "2 (N - 1) / N is 1 for two nodes"


def test_inside_a_node_the_links_do() -> None:
    rates = bounds.peak_rates(Pool(1, 8, 40, 1555, 600, 400, 312, 25))
    assert rates.exchange == pytest.approx(300e9)
    assert rates.reduce == pytest.approx(300e9 / (2 * 7 / 8))
    assert bounds.peak_rates(Pool(1, 1, 40, 1555, 0, 1, 312, 25)).exchange == math.inf, "one GPU exchanges nothing"


def test_a_step_is_what_cannot_overlap() -> None:
    work = Work(
        1000, embedding_bytes=2, activation_bytes=1, flops=6, all_to_all_bytes=3, all_reduce_bytes=5, input_bytes=1
    )
    gpu = Rates(1, 1, 1, 1, 1)
    assert bounds.step_seconds(work, gpu) == 2 + 6 + 3 + (5 - 4), "two thirds of the dense part hide the all-reduce"
    cpu = Rates(1, 1, 1, 1, 1, overlapped=False, activations=False)
    assert bounds.step_seconds(work, cpu) == 2 + 6 + 3 + 5
    assert bounds.step_seconds(work, Rates(1, 1, 1, 1, 0.01)) == 100, "the host's input is slower than all of it"
    assert bounds.step_seconds(work, Rates(1, 1, 1, 1, 1, floor_seconds=50)) == 50


# --- the command ---


def last(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*PAPER, *words]) == 0
    shown = capsys.readouterr().out.splitlines()
    found: dict[str, object] = json.loads(shown[-1])
    assert any("limited by" in line for line in shown[:-1]), "a table for people comes before it"
    return found


def test_gpus_are_planned_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    found = last(capsys, "--train.batch-size", "131072", "--sharding.types", '["table_wise"]')
    assert set(found["bounds"]) == {"HBM", "compute", "fabric", "host input", "kernel launches"}
    assert len(found["bytes_per_rank"]) == 16
    assert found["precision"] == "bf16"
    assert found["samples_per_second"] <= min(found["bounds"].values()), "no prediction is above a bound"
    slower = last(capsys, "--train.batch-size", "131072", "--sharding.types", '["table_wise"]', "--network-gbps", "25")
    assert slower["limiting"] == "fabric"
    assert slower["samples_per_second"] < found["samples_per_second"]


def test_tables_that_only_the_hosts_memory_holds_are_told_and_slow(capsys: pytest.CaptureFixture[str]) -> None:
    big = ["--model.num-embeddings", "100000000", "--train.batch-size", "65536", "--sharding.types", '["table_wise"]']
    found = last(capsys, *big)
    assert max(found["host_bytes_per_rank"]) > 20 * bounds.GIB
    assert max(found["bytes_per_rank"]) <= 40 * bounds.GIB, "what is said to be in HBM has room there"
    assert found["limiting"] == "host tables"
    assert found["samples_per_second"] <= found["bounds"]["host tables"]


def test_small_batches_are_limited_by_launching_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert last(capsys, "--train.batch-size", "16")["limiting"] == "kernel launches"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*PAPER, "--train.batch-size", "17"], "train.batch_size is 17, which 16 processes cannot share"),
        (
            [*PAPER, "--model.num-embeddings", "200000000", "--sharding.kernels", '["fused"]'],
            "the model does not fit: its tables have 1,239.8 GiB",
        ),
        ([*PAPER, "--gpu", "T4", "--train.precision", "bf16"], "train.precision is bf16, which T4 does not have"),
        (["plan", "--gpus-per-node", "8"], "--hbm-gib, --hbm-gb-per-second, --tflops, --pcie-gb-per-second missing"),
        (["plan", "--nodes", "0"], "--nodes is 0"),
        (["plan", "--hbm-gib", "-1"], "--hbm-gib is -1; legal: 0 or more"),
        (["plan", "--nodes", "many"], "invalid int value: 'many'"),
        ([*PAPER, "--train.stepz", "1"], "unknown option --train.stepz"),
    ],
)
def test_a_mistake_is_told_in_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_the_help_lists_its_own_options_and_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--gpus-per-node" in shown
    assert "--train.batch-size" in shown


def test_cpus_are_measured_in_as_many_processes_as_asked(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_tree()), encoding="utf-8")
    done: subprocess.CompletedProcess[str] = trainer("plan", "--nproc", "2", "--config", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "libraries chatter"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["processes"] == 2
    assert set(found["bounds"]) == {"memory", "compute", "fabric", "host input"}
    alone = 1 / sum(1 / found["bounds"][name] for name in ("memory", "compute", "fabric"))
    assert found["samples_per_second"] == pytest.approx(min(alone, found["bounds"]["host input"]))
