"""The sharding plan and the number of processes change neither the initial weights nor losses nor updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_jobs import DIM, PLANS, ROWS, TABLES, alone, full_weights, run_workers, steps, tables, tiny

from trainer.errors import UserError
from trainer.sharding.planner import constraints, describe_plan
from trainer.sharding.sharded_model import build_sharded_model

CLOSE = 3e-6  # sums over another order of samples and shards
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
# Under column-wise sharding, row-wise Adagrad averages the squares over the columns of each shard only.
SAME_MATHS = [
    (plan, kind)
    for plan in PLANS
    for kind in OPTIMIZERS
    if kind != "rowwise_adagrad" or plan not in ("column_wise", "mixed")
]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of workers/sharding.py on two processes."""
    return run_workers("sharding", 2, tmp_path_factory.mktemp("sharding"))


def result(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


def single(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the same as a record of workers/sharding.py, from this process."""
    config = tiny(changes)
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        start = full_weights(model)
        losses = steps(model, 6)
        return {"plan": describe_plan(model.plan, config), "start": start, "losses": losses, "end": full_weights(model)}


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, Any]]:
    """Return table-wise results of this process by optimizer, which all others must equal."""
    return {kind: single(PLANS["table_wise"] | {"optim.sparse.optimizer": kind}) for kind in OPTIMIZERS}


def dense(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k.replace("module.", ""): v for k, v in weights.items() if ".embedding_bags." not in k}


# --- the same training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_initial_weights_are_the_same_to_the_last_bit(
    plan: str, sharded: Path, reference: dict[str, dict[str, Any]]
) -> None:
    expected = reference["sgd"]["start"]
    for found in (result(sharded, f"{plan}-sgd")["start"], single(PLANS[plan])["start"]):
        for table in TABLES:
            assert torch.equal(tables(found)[table], tables(expected)[table]), (
                f"{table} starts with other weights under {plan}"
            )
        assert dense(found).keys() == dense(expected).keys()
        for name, weight in dense(found).items():
            assert torch.equal(weight, dense(expected)[name]), f"{name} starts with other weights under {plan}"


def test_initial_weights_keep_the_published_bound_and_differ_between_tables(
    reference: dict[str, dict[str, Any]],
) -> None:
    found = tables(reference["sgd"]["start"])
    for table, rows in zip(TABLES, ROWS, strict=True):
        bound = rows**-0.5
        assert bound * 0.9 < float(found[table].abs().max()) <= bound, "uniform in +-1/sqrt(rows)"
        assert abs(float(found[table].mean())) < bound * 0.1
    assert not torch.equal(found["t_cat_0"][:50] * ROWS[0] ** 0.5, found["t_cat_1"][:50] * ROWS[1] ** 0.5), (
        "one draw for two tables"
    )


@pytest.mark.parametrize(("plan", "kind"), SAME_MATHS)
def test_two_processes_train_the_same_as_one_under_every_plan(
    plan: str, kind: str, sharded: Path, reference: dict[str, dict[str, Any]]
) -> None:
    found, expected = result(sharded, f"{plan}-{kind}"), reference[kind]
    assert found["losses"] == pytest.approx(expected["losses"], abs=CLOSE), "the losses differ"
    for table in TABLES:
        torch.testing.assert_close(
            tables(found["end"])[table], tables(expected["end"])[table], rtol=1e-4, atol=2e-5, msg=table
        )


@pytest.mark.parametrize(("plan", "kind"), SAME_MATHS)
def test_one_process_trains_the_same_under_every_plan(
    plan: str, kind: str, reference: dict[str, dict[str, Any]]
) -> None:
    found = single(PLANS[plan] | {"optim.sparse.optimizer": kind})
    assert found["losses"] == pytest.approx(reference[kind]["losses"], abs=CLOSE)


@pytest.mark.parametrize("plan", ["column_wise", "mixed"])
def test_row_wise_adagrad_on_split_columns_still_trains(
    plan: str, sharded: Path, reference: dict[str, dict[str, Any]]
) -> None:
    found, expected = result(sharded, f"{plan}-rowwise_adagrad")["losses"], reference["rowwise_adagrad"]["losses"]
    assert found[0] == pytest.approx(expected[0], abs=CLOSE), "the first loss is before any update"
    assert found == pytest.approx(expected, abs=5e-3), "its step sizes are per column shard, so nearly the same"


@pytest.mark.parametrize("plan", ["row_wise", "mixed"])
def test_the_mean_of_several_ids_is_the_same_under_every_plan(plan: str, sharded: Path) -> None:
    several = {"data.ids_per_feature": 3, "model.pooling": "mean", "optim.sparse.optimizer": "adagrad"}
    expected = single(PLANS["table_wise"] | several)["losses"]
    assert result(sharded, f"{plan}-several")["losses"] == pytest.approx(expected, abs=CLOSE), "two processes"
    assert single(PLANS[plan] | several)["losses"] == pytest.approx(expected, abs=CLOSE), "one process"


def test_the_cross_network_reads_the_features_in_order_under_a_mixed_plan(sharded: Path) -> None:
    expected = single(PLANS["table_wise"] | {"model.interaction": "dcn", "optim.sparse.optimizer": "sgd"})
    assert result(sharded, "dcn-mixed")["losses"] == pytest.approx(expected["losses"], abs=CLOSE)


@pytest.mark.parametrize(("forward", "backward"), [("fp16", "fp16"), ("int8", "fp16"), ("fp32", "fp16")])
def test_a_lower_all_to_all_precision_trains_nearly_the_same(forward: str, backward: str, sharded: Path) -> None:
    found = result(sharded, f"wire-{forward}-{backward}")["losses"]
    full = result(sharded, "table_wise-rowwise_adagrad")["losses"]
    assert found != full, "the option does not reach the all-to-all"
    if forward != "fp16":  # rounding of such small weights may not show in the first loss
        assert (found[0] == full[0]) == (forward == "fp32"), "only the forward precision changes the first loss"
    assert found == pytest.approx(full, abs=2e-2)


@pytest.mark.parametrize("option", ["sharding.forward_precision", "sharding.backward_precision"])
def test_a_bf16_all_to_all_is_an_error_on_cpu(option: str) -> None:
    config = tiny({option: "bf16"})
    with (
        pytest.raises(UserError, match=rf"{option} is not supported by gloo.*got bf16; allowed: fp32, fp16, int8"),
        alone(config) as runtime,
    ):
        build_sharded_model(config, runtime)


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["forward_precision", "backward_precision"])
def test_an_int8_all_to_all_excludes_row_wise_tables(option: str) -> None:
    only = tiny({f"sharding.{option}": "int8", "sharding.tables": {"t_cat_1": ["row_wise"]}})
    with pytest.raises(UserError, match=rf"does not support sharding\.{option}: got int8"):
        constraints(only)
    allowed = constraints(tiny({f"sharding.{option}": "int8"}))
    assert all("row_wise" not in (limits.sharding_types or ()) for limits in allowed.values())


@pytest.mark.parametrize("plan", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_tables_have_the_allowed_sharding_type(plan: str, sharded: Path) -> None:
    assert [t.sharding for t in result(sharded, f"{plan}-sgd")["plan"]] == [plan] * 3


def test_each_table_has_a_sharding_type_of_its_own_list(sharded: Path) -> None:
    described = result(sharded, "mixed-sgd")["plan"]
    assert [t.table for t in described] == list(TABLES), "in canonical order"
    assert [t.sharding for t in described] == ["row_wise", "column_wise", "data_parallel"]


def test_the_bytes_of_the_plan_sum_to_the_size_of_the_tables(sharded: Path) -> None:
    for plan in PLANS:
        for described, rows in zip(result(sharded, f"{plan}-sgd")["plan"], ROWS, strict=True):
            size, held = rows * DIM * 4, described.bytes_per_rank
            assert (described.rows, described.dim) == (rows, DIM)
            if described.sharding == "data_parallel":
                assert held == {0: size, 1: size}, "every process holds a copy"
            else:
                assert sum(held.values()) == size, f"{described.table} {described.sharding}"
            if described.sharding == "column_wise":
                assert held == {0: size // 2, 1: size // 2}, "two shards of half the columns"
            if described.sharding == "row_wise":
                assert held == {0: (rows + 1) // 2 * DIM * 4, 1: rows // 2 * DIM * 4}, "half the rows each"


def test_table_wise_tables_are_spread_over_the_processes(sharded: Path) -> None:
    described = result(sharded, "table_wise-sgd")["plan"]
    assert {rank for t in described for rank in t.bytes_per_rank} == {0, 1}, "one process has no table"


@pytest.mark.parametrize("columns", [4, 8])
def test_column_wise_shards_have_the_minimum_width(columns: int) -> None:
    wide = {"model.embedding_dim": 16, "model.dense_arch": [16]}
    config = tiny(wide | {"sharding.types": ["column_wise"], "sharding.min_columns": columns})
    with alone(config) as runtime:
        plan = build_sharded_model(config, runtime).plan
    (module_plan,) = plan.plan.values()
    widths = {shard.shard_sizes[1] for p in module_plan.values() for shard in p.sharding_spec.shards}
    assert min(widths) == columns


def test_column_wise_only_is_an_error_for_narrow_tables() -> None:
    config = tiny({"sharding.types": ["column_wise"]})
    with (
        pytest.raises(UserError, match=r"embedding_dim 8, .*at least 128.*--sharding\.min-columns"),
        alone(config) as runtime,
    ):
        build_sharded_model(config, runtime)


def test_the_error_for_too_little_memory_names_options_that_help() -> None:
    config = tiny({"sharding.hbm_cap_gib": 1e-6})
    with pytest.raises(UserError) as caught, alone(config) as runtime:
        build_sharded_model(config, runtime)
    for part in ("no sharding plan fits 1 processes", "sharding.hbm_cap_gib", "--model.num-embeddings-cap"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_plan_respects_the_reserved_share_of_memory() -> None:
    rows = {"model.num_embeddings": 100_000, "sharding.hbm_cap_gib": 0.03}
    with alone(config := tiny(rows | {"sharding.reserve_fraction": 0.0})) as runtime:
        build_sharded_model(config, runtime)
    config = tiny(rows | {"sharding.reserve_fraction": 0.9})
    with pytest.raises(UserError, match="90% is reserved"), alone(config) as runtime:
        build_sharded_model(config, runtime)


def test_kernels_without_an_allowed_sharding_type_are_an_error() -> None:
    config = tiny({"sharding.types": ["data_parallel"], "sharding.kernels": ["fused"]})
    with pytest.raises(UserError, match=r"sharding\.kernels fused; allowed on CPU"), alone(config) as runtime:
        build_sharded_model(config, runtime)


def test_a_batch_that_does_not_divide_is_an_error_before_the_model_is_built() -> None:
    config = tiny({"train.batch_size": 33})
    with alone(config) as runtime:
        runtime.world_size = 2
        with pytest.raises(
            UserError, match=r"train\.batch_size does not divide by 2 processes: got 33; allowed: multiples of 2"
        ):
            build_sharded_model(config, runtime)
