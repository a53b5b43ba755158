"""`python -m trainer plan`: the work of a step compared with counts by hand, and the command's output."""

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
from trainer.planning import roofline, work
from trainer.planning.roofline import GpuNodes, Rates
from trainer.planning.work import Shard, Work

PAPER = [
    "plan", "--nodes", "2", "--gpus-per-node", "8", "--gpu", "A100 40GB", "--hbm-gib", "40",
    "--hbm-gb-per-second", "1555", "--nvlink-gb-per-second", "600", "--network-gbps", "400",
]  # fmt: skip


def config(**data: object) -> TrainConfig:
    return validate({"data": {"num_sparse": 26, **data}, "train": {"batch_size": 4096}})


def test_the_flops_of_the_default_model_equal_the_count_by_hand() -> None:
    bottom = 13 * 512 + 512 * 256 + 256 * 64
    top = 415 * 512 + 512 * 256 + 256
    model = validate({"model": {"over_arch": [512, 256, 1]}})
    assert work.flops_per_sample(model) == 6 * (bottom + 27 * 27 * 64 + top)


def test_the_dense_parameters_are_as_many_as_in_the_model() -> None:
    pytest.importorskip("torch")
    from trainer.model.dlrm import build_model

    for changes in ({"model.interaction": "dot"}, {"model.interaction": "dcn", "model.dcn_low_rank_dim": 4}):
        small = validate(tiny_tree(changes))
        model = build_model(small, "fp32")
        dense = sum(p.numel() for name, p in model.named_parameters() if "embedding_bags" not in name)
        assert work.dense_parameters(small) == dense


def test_a_lookup_moves_the_row_three_times_and_the_output_twice() -> None:
    shard = Shard("table_wise", 0, 100_000, 64)
    row = 64 * 4
    assert work.embedding_bytes(config(), [shard], 2) == 4096 * (3 * row + 8 + 8 + 2 * row)
    two_ids = work.embedding_bytes(config(ids_per_feature=2), [shard], 2)
    assert two_ids == 4096 * (2 * (3 * row + 8 + 8) + 2 * row)


def test_row_wise_shards_divide_lookups_but_not_outputs() -> None:
    shard, row = Shard("row_wise", 0, 50_000, 64), 64 * 4
    assert work.embedding_bytes(config(), [shard], 2) == 2048 * (3 * row + 8 + 8) + 4096 * 2 * row


def test_all_to_all_sends_vectors_forward_and_gradients_and_ids_backward() -> None:
    mine, other = Shard("table_wise", 0, 10, 64), Shard("table_wise", 1, 10, 64)
    row = 64 * 4
    assert work.all_to_all_bytes(config(), [mine], 0, 2) == 2048 * row, "vectors for the other process's half"
    assert work.all_to_all_bytes(config(), [other], 0, 2) == 2048 * (row + 8 + 4), "gradients, ids and lengths"
    assert work.all_to_all_bytes(config(), [mine, other], 0, 1 + 1) == 2048 * (2 * row + 12)
    assert work.all_to_all_bytes(config(), [Shard("data_parallel", 0, 10, 64)], 0, 2) == 0


def test_half_precision_halves_the_all_to_all_bytes() -> None:
    half = validate({"sharding": {"forward_precision": "fp16"}, "train": {"batch_size": 4096}})
    shard = Shard("table_wise", 0, 10, 64)
    assert work.all_to_all_bytes(half, [shard], 0, 2) * 2 == work.all_to_all_bytes(config(), [shard], 0, 2)


def test_a_data_parallel_table_is_all_reduced_with_the_dense_part() -> None:
    shards = [Shard("data_parallel", rank, 1000, 64) for rank in (0, 1)]
    found = work.step_work(config(), shards, 2, "fp32")
    assert found.all_reduce_bytes == 4 * (work.dense_parameters(config()) + 64_000)
    assert work.step_work(config(), shards[:1], 1, "fp32").all_reduce_bytes == 0, "a single process reduces nothing"


def test_the_input_of_a_sample_is_576_bytes() -> None:
    assert work.input_bytes_per_sample(config(ids_per_feature=2)) == 576


def test_bytes_per_rank_include_weights_and_optimizer_state() -> None:
    dense = work.dense_parameters(config()) * 4 * 3
    shards = [Shard("table_wise", 0, 1000, 64)]
    assert work.bytes_per_rank(config(), shards, 2) == [dense + 1000 * (64 * 4 + 4), dense]


NODES = GpuNodes(2, 8, 40, 1555, 600, 400, 312, 25)


def test_between_nodes_the_shared_network_limits_the_all_to_all() -> None:
    rates = roofline.peak_rates(NODES)
    assert rates.all_to_all == pytest.approx(50e9 / (8 / 15 * 8)), (
        "8 of 15 partners are behind 400 Gbps that 8 GPUs share"
    )
    assert rates.all_reduce == pytest.approx(50e9), "2 (N - 1) / N is 1 for two nodes"


def test_inside_a_node_the_links_limit_the_all_to_all() -> None:
    rates = roofline.peak_rates(GpuNodes(1, 8, 40, 1555, 600, 400, 312, 25))
    assert rates.all_to_all == pytest.approx(300e9)
    assert rates.all_reduce == pytest.approx(300e9 / (2 * 7 / 8))
    assert roofline.peak_rates(GpuNodes(1, 1, 40, 1555, 0, 1, 312, 25)).all_to_all == math.inf, (
        "one GPU has no all-to-all"
    )


def test_a_step_takes_as_long_as_the_work_that_cannot_overlap() -> None:
    step = Work(
        1000, embedding_bytes=2, activation_bytes=1, flops=6, all_to_all_bytes=3, all_reduce_bytes=5, input_bytes=1
    )
    gpu = Rates(1, 1, 1, 1, 1)
    assert roofline.step_seconds(step, gpu) == 2 + 6 + 3 + (5 - 4), "two thirds of the dense part hide the all-reduce"
    cpu = Rates(1, 1, 1, 1, 1, overlapped=False, count_activations=False)
    assert roofline.step_seconds(step, cpu) == 2 + 6 + 3 + 5
    assert roofline.step_seconds(step, Rates(1, 1, 1, 1, 0.01)) == 100, "the input is slower than everything else"
    assert roofline.step_seconds(step, Rates(1, 1, 1, 1, 1, launch_seconds=50)) == 50


# --- the command ---


def last(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*PAPER, *words]) == 0
    shown = capsys.readouterr().out.splitlines()
    found: dict[str, object] = json.loads(shown[-1])
    assert any("limited by" in line for line in shown[:-1]), "a readable table precedes the JSON line"
    return found


def test_plans_for_gpus_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = last(capsys, "--train.batch-size", "131072", "--sharding.types", '["table_wise"]')
    assert set(found["bounds"]) == {"HBM", "compute", "fabric", "host input", "kernel launches"}
    assert len(found["bytes_per_rank"]) == 16
    assert found["precision"] == "bf16"
    assert found["samples_per_second"] <= min(found["bounds"].values()), "no prediction is above a bound"
    slower = last(capsys, "--train.batch-size", "131072", "--sharding.types", '["table_wise"]', "--network-gbps", "25")
    assert slower["limiting"] == "fabric"
    assert slower["samples_per_second"] < found["samples_per_second"]


def test_tables_that_fit_only_into_host_memory_are_reported_and_slow(capsys: pytest.CaptureFixture[str]) -> None:
    big = ["--model.num-embeddings", "100000000", "--train.batch-size", "65536", "--sharding.types", '["table_wise"]']
    found = last(capsys, *big)
    assert max(found["host_bytes_per_rank"]) > 20 * roofline.GIB
    assert max(found["bytes_per_rank"]) <= 40 * roofline.GIB, "reported as in HBM, but larger than HBM"
    assert found["limiting"] == "host tables"
    assert found["samples_per_second"] <= found["bounds"]["host tables"]


def test_small_batches_are_limited_by_launching_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert last(capsys, "--train.batch-size", "16")["limiting"] == "kernel launches"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*PAPER, "--train.batch-size", "17"],
            "train.batch_size does not divide by 16 processes: got 17; allowed: multiples of 16",
        ),
        (
            [*PAPER, "--model.num-embeddings", "200000000", "--sharding.kernels", '["fused"]'],
            "the tables have 1,239.8 GiB",
        ),
        (
            [*PAPER, "--gpu", "T4", "--train.precision", "bf16"],
            "train.precision is not supported by T4: got bf16; allowed: auto, fp32",
        ),
        (["plan", "--gpus-per-node", "8"], "--hbm-gib, --hbm-gb-per-second, --tflops, --pcie-gb-per-second missing"),
        (["plan", "--nodes", "0"], "--nodes is too small: got 0; allowed: 1 or more"),
        (["plan", "--hbm-gib", "-1"], "--hbm-gib is too small: got -1; allowed: 0 or more"),
        (["plan", "--nodes", "many"], "invalid int value: 'many'"),
        ([*PAPER, "--train.stepz", "1"], "unknown option --train.stepz"),
    ],
)
def test_a_user_mistake_is_reported_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_help_lists_the_options_of_the_command_and_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--gpus-per-node" in shown
    assert "--train.batch-size" in shown


def test_cpus_are_measured_in_the_requested_number_of_processes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_tree()), encoding="utf-8")
    done: subprocess.CompletedProcess[str] = trainer("plan", "--nproc", "2", "--config", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "libraries print to stderr"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["processes"] == 2
    assert set(found["bounds"]) == {"memory", "compute", "fabric", "host input"}
    alone = 1 / sum(1 / found["bounds"][name] for name in ("memory", "compute", "fabric"))
    assert found["samples_per_second"] == pytest.approx(min(alone, found["bounds"]["host input"]))
