"""Every option has an effect: two values give two different runs, or equal runs where they must.

The lists below cover every option outside section data. A new option fails the first test until it has a case here.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import PLANS, alone, first_steps, tiny

from trainer.config import leaves
from trainer.config.options import load_config
from trainer.runtime import precision as numerics
from trainer.sharding.planner import describe_plan
from trainer.sharding.sharded_model import build_sharded_model

HERE = Path(__file__).parent
SGD, ADAGRAD, ADAM = ({"optim.dense.optimizer": kind} for kind in ("sgd", "adagrad", "adam"))
ADAMW, ROWWISE = {"optim.dense.optimizer": "adamw"}, {"optim.sparse.optimizer": "rowwise_adagrad"}
SPARSE_ADAGRAD = {"optim.sparse.optimizer": "adagrad"}
REPLICATED = PLANS["data_parallel"]
POLYNOMIAL = {"optim.schedule.decay": "polynomial"}
DCN = {"model.interaction": "dcn", "model.dcn_low_rank_dim": 4, "model.dcn_num_layers": 2}

# (option, other settings, one value, another value): the runs differ.
DIFFER: list[tuple[str, dict[str, Any], Any, Any]] = [
    *[("optim.sparse.optimizer", plan, a, b)
      for plan in ({}, REPLICATED) for a, b in (("sgd", "adagrad"), ("adagrad", "rowwise_adagrad"))],
    *[("optim.sparse.learning_rate", plan | {"optim.sparse.optimizer": kind}, 0.05, 0.5)
      for plan in ({}, REPLICATED) for kind in ("sgd", "adagrad", "rowwise_adagrad")],
    *[("optim.sparse.eps", plan | kind, 1e-8, 1e-2) for plan in ({}, REPLICATED) for kind in (SPARSE_ADAGRAD, ROWWISE)],
    *[("optim.dense.optimizer", {}, a, b) for a, b in (("sgd", "adagrad"), ("adagrad", "adam"))],
    ("optim.dense.optimizer", {"optim.dense.weight_decay": 0.5}, "adam", "adamw"),
    *[("optim.dense.learning_rate", kind, 0.01, 0.02) for kind in (SGD, ADAGRAD, ADAM, ADAMW)],
    *[("optim.dense.eps", kind, 1e-8, 1e-2) for kind in (ADAGRAD, ADAM, ADAMW)],
    ("optim.dense.momentum", SGD, 0.0, 0.9),
    *[("optim.dense.weight_decay", kind, 0.0, 0.5) for kind in (SGD, ADAGRAD, ADAM, ADAMW)],
    *[("optim.dense.beta1", kind, 0.9, 0.1) for kind in (ADAM, ADAMW)],
    *[("optim.dense.beta2", kind, 0.999, 0.5) for kind in (ADAM, ADAMW)],
    *[("optim.dense.clip_norm", kind, None, 1e-3) for kind in (SGD, ADAM | {"optim.dense.eps": 1e-2})],
    ("optim.schedule.decay", {}, "constant", "polynomial"),
    ("optim.schedule.decay", {}, "polynomial", "cosine"),
    ("optim.schedule.warmup_steps", {}, 0, 3),
    ("optim.schedule.decay_start_step", POLYNOMIAL, 0, 2),
    ("optim.schedule.decay_steps", POLYNOMIAL, None, 2),
    ("optim.schedule.power", POLYNOMIAL, 1.0, 2.0),
    ("optim.schedule.end_factor", POLYNOMIAL, 0.0, 0.5),
    ("model.num_embeddings", {}, 50, 60),
    ("model.num_embeddings_cap", {}, None, 20),
    ("model.embedding_dim", {"model.dense_arch": None}, 8, 4),
    ("model.pooling", {"data.ids_per_feature": 2}, "sum", "mean"),
    ("model.dense_arch", {}, [16, 8], [12, 8]),
    ("model.over_arch", {}, [16, 1], [12, 1]),
    ("model.interaction", DCN, "dot", "dcn"),
    ("model.dcn_num_layers", DCN, 1, 2),
    ("model.dcn_low_rank_dim", DCN, 2, 4),
    ("train.seed", {}, 0, 1),
    ("train.batch_size", {}, 48, 32),
]  # fmt: skip

# (option, one value, another value): the losses are bitwise equal.
AGREE: list[tuple[str, Any, Any]] = [
    ("train.pipeline", "sparse_dist", "base"),
    ("train.pipeline", "sparse_dist", "none"),
    ("sharding.types", ["table_wise"], ["row_wise"]),
]

# Options whose effect another test shows; a test below checks that it exists.
ELSEWHERE = {
    "optim.sparse.beta1": "test_optimizers.py::test_sparse_adam_uses_all_its_settings",
    "optim.sparse.beta2": "test_optimizers.py::test_sparse_adam_uses_all_its_settings",
    "sharding.tables": "test_sharding.py::test_each_table_has_a_sharding_type_of_its_own_list",
    "sharding.kernels": "test_options.py::test_the_planner_uses_only_allowed_kernels",
    "sharding.min_columns": "test_sharding.py::test_column_wise_shards_have_the_minimum_width",
    "sharding.hbm_cap_gib": "test_sharding.py::test_the_error_for_too_little_memory_names_options_that_help",
    "sharding.reserve_fraction": "test_sharding.py::test_the_plan_respects_the_reserved_share_of_memory",
    "sharding.forward_precision": "test_sharding.py::test_a_lower_all_to_all_precision_trains_nearly_the_same",
    "sharding.backward_precision": "test_sharding.py::test_a_lower_all_to_all_precision_trains_nearly_the_same",
    "optim.sparse.update": "test_rowwise_adagrad.py::test_both_updates_train_the_same_and_auto_reports_its_choice",
    "train.fused_interaction": "test_interaction.py::test_the_option_selects_the_fused_or_the_plain_product",
    "sharding.exchange": "test_shared_memory_all_to_all.py::test_shared_memory_trains_the_same_to_the_last_bit",
    "train.malloc": "test_malloc.py::test_memory_is_kept_as_configured",
    "train.run": "test_train.py::test_two_runs_are_independent",
    "train.eval_batch_size": "test_train.py::test_the_evaluation_batch_size_does_not_change_the_quality",
    "train.epochs": "test_train.py::test_a_run_without_steps_trains_its_epochs",
    "train.steps": "test_train.py::test_a_run_without_steps_trains_its_epochs",
    "train.device": "test_errors.py::test_a_required_gpu_that_is_missing_is_reported_once",
    "train.precision": "test_options.py::test_bf16_reaches_the_dense_layers",
    "train.compile": "test_options.py::test_compiling_the_dense_parts_changes_no_loss",
    "train.num_threads": "test_options.py::test_the_number_of_threads_equals_the_option",
    "train.eval_every": "test_train.py::test_evaluations_run_every_eval_every_steps",
    "train.target_auc": "test_train.py::test_a_run_stops_at_its_target_auc",
    "train.timeout_seconds": "test_options.py::test_the_process_group_has_the_timeout_of_the_option",
    "checkpoint.uri": "test_checkpoint.py::test_a_run_resumes_from_an_fsspec_uri",
    "checkpoint.every_steps": "test_checkpoint.py::test_only_the_newest_checkpoints_are_kept",
    "train.batch_size_is": "faults/test_elastic.py::test_a_batch_size_per_process_grows_with_the_job",
    "checkpoint.every_minutes": "faults/test_saves.py::test_saves_follow_the_clock",
    "checkpoint.asynchronous": "faults/test_hangs.py::test_a_slow_save_is_not_a_hanging_step",
    "checkpoint.direct_io": "test_direct.py::test_a_checkpoint_is_the_same_with_direct_io_and_without",
    "checkpoint.keep_every_steps": "faults/test_saves.py::test_milestones_are_kept_while_other_checkpoints_are_deleted",
    "checkpoint.max_failures": "faults/test_saves.py::test_too_many_failed_saves_in_a_row_end_the_run_with_one_line",
    "checkpoint.attempts": "faults/test_stores.py::test_a_failing_store_is_an_error_after_the_configured_attempts",
    "checkpoint.request_timeout_seconds": "faults/test_stores.py::test_a_silent_store_is_an_error_after_the_timeout",
    "fault.grace_seconds": "faults/test_signals.py::test_a_process_exits_when_its_grace_period_ends",
    "fault.save_if_older_seconds": "faults/test_signals.py::test_a_recent_save_is_not_repeated_before_a_stop",
    "fault.step_timeout_seconds": "faults/test_hangs.py::test_a_hanging_process_ends_all_and_its_stack_is_printed",
    "fault.notices": "faults/test_spot_notices.py::test_a_run_saves_and_stops_on_an_interruption_notice",
    "fault.notices_endpoint": "faults/test_spot_notices.py::test_a_run_saves_and_stops_on_an_interruption_notice",
    "fault.notices_poll_seconds": "faults/test_spot_notices.py::test_a_notice_is_handled_only_once",
    "checkpoint.keep": "test_checkpoint.py::test_only_the_newest_checkpoints_are_kept",
    "checkpoint.resume": "test_checkpoint.py::test_a_resume_that_is_required_needs_a_checkpoint",
    "metrics.log_every": "test_train.py::test_reports_come_every_log_every_steps_and_at_the_end",
    "metrics.window_samples": "test_train.py::test_training_metrics_cover_the_window",
    "metrics.train_metrics": "test_train.py::test_training_metrics_can_be_disabled",
    "metrics.dir": "test_train.py::test_metrics_dir_selects_the_folder_of_the_logs",
    "metrics.tensorboard": "test_train.py::test_tensorboard_reads_the_scalars",
    "metrics.jsonl": "test_train.py::test_logs_can_be_disabled",
    "metrics.prometheus_port": "test_train.py::test_prometheus_reads_the_gauges_during_a_run",
    "metrics.prometheus_host": "test_train.py::test_prometheus_reads_the_gauges_during_a_run",
    "metrics.progress": "test_train.py::test_progress_none_prints_only_the_result",
}


def test_every_option_outside_the_data_section_has_a_case() -> None:
    covered = {case[0] for case in DIFFER} | {case[0] for case in AGREE} | set(ELSEWHERE)
    options = {".".join(path) for path in leaves() if path[0] != "data"}
    assert options - covered == set(), "no test shows an effect of these options"
    assert covered - options == set(), "these options do not exist"


def test_the_listed_tests_exist() -> None:
    for option, name in ELSEWHERE.items():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (HERE / file).read_text(encoding="utf-8"), f"{option}: there is no {name}"


def case_name(case: tuple[Any, ...]) -> str:
    option, *_, one, other = case
    rest = "-".join(str(v) for v in case[1].values()) if isinstance(case[1], dict) else ""
    return f"{option}-{one}-{other}" + (f"-{rest}" if rest else "")


def with_value(option: str, others: dict[str, Any], value: Any) -> dict[str, Any]:
    changes = others | {option: value}
    if option == "model.embedding_dim":
        changes["model.dense_arch"] = [16, value]
    return changes


@functools.cache
def losses_of(changes: tuple[tuple[str, str], ...]) -> tuple[float, ...]:
    return tuple(first_steps({option: eval(value) for option, value in changes}))


def losses(changes: dict[str, Any]) -> tuple[float, ...]:
    return losses_of(tuple(sorted((option, repr(value)) for option, value in changes.items())))


@pytest.mark.parametrize("case", DIFFER, ids=case_name)
def test_two_values_of_an_option_train_differently(case: tuple[str, dict[str, Any], Any, Any]) -> None:
    option, others, one, other = case
    first, second = (losses(with_value(option, others, value)) for value in (one, other))
    assert first != second, (
        f"{option} = {one} and {other} train the same: the option does not reach the code that it names"
    )


@pytest.mark.parametrize("case", AGREE, ids=case_name)
def test_an_option_of_the_execution_does_not_change_the_losses(case: tuple[str, Any, Any]) -> None:
    option, one, other = case
    assert losses({option: one}) == losses({option: other}), f"{option} changes the maths"


def test_compiling_the_dense_parts_changes_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_quickly(function: Any, *arguments: Any, **options: Any) -> Any:
        compiled.append(function)
        return original(
            function, backend="aot_eager"
        )  # traces like the default backend, without half a minute of C++ compilation

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_quickly)
    plain, with_compile = first_steps(), first_steps({"train.compile": True})
    assert len(compiled) == 2, "both dense parts are compiled, and only on request"
    assert with_compile == pytest.approx(plain, abs=1e-6)


def test_bf16_reaches_the_dense_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_cpu_flags", lambda: {"avx512_bf16"})
    low, full = first_steps({"train.precision": "bf16"}), first_steps({"train.precision": "fp32"})
    assert low != full, "train.precision does not reach the model"
    assert low == pytest.approx(full, abs=2e-2), "bf16 has 8 bits, so the third digit may differ"


def test_precision_auto_depends_on_the_device_and_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for flags, expected in (
        ({"avx512_bf16"}, "bf16"),
        ({"amx_bf16"}, "bf16"),
        ({"avx2", "avx512f"}, "fp32"),
        (set(), "fp32"),
    ):
        monkeypatch.setattr(numerics, "_cpu_flags", lambda flags=flags: flags)
        precision, reason = numerics.choose_precision("auto", cpu)
        assert precision == expected
        assert "bf16" in reason
    for value in ("bf16", "tf32"):
        with pytest.raises(ValueError, match=rf"train\.precision is {value}.*allowed: auto, fp32"):
            numerics.choose_precision(value, cpu)


def test_the_number_of_threads_equals_the_option() -> None:
    for count in (1, 2):
        with alone(tiny({"train.num_threads": count})):
            assert torch.get_num_threads() == count


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_the_planner_uses_only_allowed_kernels(kernel: str) -> None:
    config = tiny({"sharding.kernels": [kernel]})
    with alone(config) as runtime:
        described = describe_plan(build_sharded_model(config, runtime).plan, config)
    assert {table.kernel for table in described} == {kernel}


def test_the_process_group_has_the_timeout_of_the_option() -> None:
    with alone(tiny({"train.timeout_seconds": 77})):
        group = torch.distributed.group.WORLD
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77


def test_without_the_option_the_processes_share_all_cores() -> None:
    with alone(tiny({"train.num_threads": None})):
        assert torch.get_num_threads() == len(os.sched_getaffinity(0)), "one process alone may use all cores"


def test_a_file_and_the_command_line_win_over_the_base(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"model": {"dense_arch": [4, 8]}}))
    base = {"model": {"dense_arch": [16, 8], "over_arch": [2, 1], "embedding_dim": 8}}
    config = load_config(["--config", str(file), "--model.over-arch", "[3, 1]"], {}, base)
    assert config.model.dense_arch == (4, 8), "the file wins, and does not mix its list with the one of the base"
    assert config.model.over_arch == (3, 1)
    assert config.model.embedding_dim == 8, "what neither names comes from the base"
