"""The optimizers compute the published updates, fused and dense, and one schedule changes both learning rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_jobs import DIM, PLANS, ROWS, TABLES, after, alone, full_weights, steps, tables, tiny
from torch import Tensor

from trainer.config import ScheduleConfig, SparseOptimConfig
from trainer.data import SourceContext, open_source
from trainer.errors import UserError
from trainer.model.dlrm import Dlrm
from trainer.sharding.optimizers import fused_params, schedule_factor
from trainer.sharding.sharded_model import build_sharded_model

RATE, EPS = 0.3, 1e-3


# --- schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, {0: 1.0, 50: 1.0, 10_000: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 99: 1.0}),
        ({"decay": "polynomial", "power": 1.0}, {0: 1.0, 25: 0.75, 50: 0.5, 99: 0.01, 100: 0.0, 500: 0.0}),
        ({"decay": "polynomial", "power": 2.0}, {0: 1.0, 50: 0.25, 90: 0.01, 100: 0.0}),
        ({"decay": "polynomial", "power": 1.0, "end_factor": 0.2}, {0: 1.0, 50: 0.6, 100: 0.2, 500: 0.2}),
        ({"decay": "cosine"}, {0: 1.0, 50: 0.5, 25: (1 + math.sqrt(0.5)) / 2, 100: 0.0, 500: 0.0}),
        ({"decay": "cosine", "end_factor": 0.5}, {0: 1.0, 50: 0.75, 100: 0.5, 101: 0.5}),
        ({"decay": "polynomial", "power": 1.0, "decay_start_step": 60}, {59: 1.0, 60: 1.0, 80: 0.5, 100: 0.0}),
        ({"decay": "polynomial", "power": 1.0, "decay_steps": 10}, {0: 1.0, 5: 0.5, 10: 0.0, 99: 0.0}),
        ({"decay": "cosine", "warmup_steps": 20, "decay_start_step": 10}, {9: 0.5, 19: 1.0, 60: 0.5, 100: 0.0}),
        ({"decay": "constant", "decay_start_step": 5, "end_factor": 0.1}, {4: 1.0, 50: 1.0}),
    ],
)  # fmt: skip
def test_the_schedule_follows_its_formula(schedule: dict[str, Any], expected: dict[int, float]) -> None:
    config = ScheduleConfig.model_validate(schedule)
    for step, factor in expected.items():
        assert schedule_factor(config, step, total_steps=100) == pytest.approx(factor, abs=1e-12), f"step {step}"


def test_a_decay_after_the_end_of_the_run_does_not_divide_by_zero() -> None:
    config = ScheduleConfig(decay="cosine", decay_start_step=100)
    assert [schedule_factor(config, step, total_steps=100) for step in (0, 99)] == [1.0, 1.0]


@pytest.mark.parametrize("plan", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("dense", ["sgd", "adagrad", "adam", "adamw"])
def test_a_factor_of_zero_freezes_every_weight(plan: str, dense: str) -> None:
    with alone(config := tiny(PLANS[plan] | {"optim.dense.optimizer": dense})) as runtime:
        model = build_sharded_model(config, runtime)
        before = full_weights(model)
        steps(model, 1)
        assert any(not torch.equal(before[k], v) for k, v in full_weights(model).items()), "it did not train at all"
        config_zero = {"optim.schedule.decay": "polynomial", "optim.schedule.decay_steps": 1}
        frozen = tiny(PLANS[plan] | {"optim.dense.optimizer": dense} | config_zero)
        model.config = frozen
        before = full_weights(model)
        steps(model, 2, after(frozen, 1))
        moved = [k for k, v in full_weights(model).items() if not torch.equal(before[k], v)]
        assert not moved, "the schedule does not change the rate of these weights"


# --- updates of the tables -------------------------------------------------------------------------------------------


def reference_update(optimizer: str, weight: Tensor, gradient: Tensor, state: Tensor) -> None:
    """Update `weight` and `state` in place as published; `state` is (rows, columns), for row-wise Adagrad (rows, 1)."""
    if optimizer == "sgd":
        weight -= RATE * gradient
        return
    squares = gradient.square()
    state += squares.mean(1, keepdim=True) if optimizer == "rowwise_adagrad" else squares
    weight -= RATE * gradient / (state.sqrt() + EPS)


@pytest.mark.parametrize("plan", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_the_sharded_model_trains_like_a_plain_model_with_textbook_updates(
    plan: str, optimizer: str, pooling: str
) -> None:
    changes = {
        "optim.sparse.optimizer": optimizer,
        "optim.sparse.learning_rate": RATE,
        "optim.sparse.eps": EPS,
        "optim.dense.optimizer": "sgd",
        "optim.dense.learning_rate": 0.1,
        "model.pooling": pooling,
        "data.ids_per_feature": 3,
    }
    config = tiny(PLANS[plan] | changes)
    with alone(config) as runtime:
        model = build_sharded_model(config, runtime)
        plain = Dlrm(config, "fp32", torch.device("cpu"))
        names = dict(plain.named_parameters())
        plain.load_state_dict({k.removeprefix("model."): v for k, v in unwrapped(full_weights(model)).items()})
        losses = steps(model, 5)
        trained = unwrapped(full_weights(model))
    source = open_source(SourceContext(config, "train", torch.device("cpu")))
    width = 1 if optimizer == "rowwise_adagrad" else DIM
    states = {t: torch.zeros(r, width) for t, r in zip(TABLES, ROWS, strict=True)}
    for step in range(5):
        batch = source.read(step * 48, 48)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(plain(batch.dense_BD, batch.sparse), batch.labels_B)
        assert losses[step] == pytest.approx(loss.item(), abs=2e-6), f"the loss of step {step} differs"
        gradients = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
        with torch.no_grad():
            for name, parameter in names.items():
                if ".embedding_bags." in name:
                    reference_update(optimizer, parameter, gradients[name], states[name.split(".")[2]])
                else:
                    parameter.sub_(gradients[name], alpha=0.1)
    for name, parameter in names.items():
        torch.testing.assert_close(trained["model." + name], parameter.detach(), rtol=1e-5, atol=1e-5, msg=name)


def unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under names without the prefixes of DistributedDataParallel."""
    return {name.replace("module.", "").removeprefix("_dmp_wrapped_"): value for name, value in weights.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_clipping_limits_the_norm_of_the_dense_gradient_only(optimizer: str) -> None:
    base = {"optim.dense.optimizer": optimizer, "optim.dense.learning_rate": 1.0, "optim.sparse.optimizer": "sgd"}
    norms, moved = {}, {}
    for clip in (None, 1e-3):
        config = tiny(base | {"optim.dense.clip_norm": clip})
        with alone(config) as runtime:
            model = build_sharded_model(config, runtime)
            before = full_weights(model)
            steps(model, 1)
            after_ = full_weights(model)
        dense = [k for k in before if ".embedding_bags." not in k]
        norms[clip] = float(torch.sqrt(sum(((after_[k] - before[k]).square().sum() for k in dense), torch.zeros(()))))
        moved[clip] = tables({k: after_[k] - before[k] for k in before})
    if optimizer == "sgd":
        assert norms[None] > 0.01, "the gradient is too small for the test to mean anything"
        assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3), (
            "with sgd and rate 1 the step is as long as the clipped gradient"
        )
    for table in TABLES:
        assert torch.equal(moved[None][table], moved[1e-3][table]), "the tables' gradient must not be clipped"


# --- unsupported optimizers ------------------------------------------------------------------------------------------


def test_sparse_adam_is_an_error_on_cpu() -> None:
    config = tiny({"optim.sparse.optimizer": "adam"})
    with (
        pytest.raises(
            UserError, match=r"optim\.sparse\.optimizer is adam.*allowed on CPU: sgd, adagrad, rowwise_adagrad"
        ),
        alone(config) as runtime,
    ):
        build_sharded_model(config, runtime)


def test_sparse_adam_uses_all_its_settings() -> None:
    config = SparseOptimConfig(optimizer="adam", learning_rate=0.25, eps=1e-3, beta1=0.5, beta2=0.75)
    params = fused_params(config, torch.device("cuda"))
    assert {k: v for k, v in params.items() if k != "optimizer"} == {
        "learning_rate": 0.25,
        "eps": 1e-3,
        "beta1": 0.5,
        "beta2": 0.75,
    }
    assert params["optimizer"].name == "ADAM"
