"""The interactions: the fused product equals the plain one, and the order of features changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_jobs import first_steps, tiny
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from trainer.model.dlrm import build_model
from trainer.model.interaction import CrossInteraction, DotInteraction, _DenseAndPairs

FEATURES = ("a", "b", "c", "d")
BATCH, DIM = 5, 8
ORDERS = [("a", "b", "c", "d"), ("d", "c", "b", "a"), ("c", "a", "d", "b")]

Interaction = DotInteraction | CrossInteraction


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(BATCH, DIM, generator=generator, dtype=dtype)
    return dense, {f: torch.randn(BATCH, DIM, generator=generator, dtype=dtype) for f in FEATURES}


def run(
    module: Interaction, order: tuple[str, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the output and the gradients of the dense vector and of each feature, for features in `order`."""
    dense, sparse = inputs(dtype=dtype)
    dense.requires_grad_()
    values = torch.cat([sparse[f] for f in order], dim=1).requires_grad_()
    out = module(dense, KeyedTensor(list(order), [DIM] * len(order), values))
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=dtype)
    dense_grad, values_grad = torch.autograd.grad(out, (dense, values), upstream)
    return out.detach(), dense_grad, dict(zip(order, values_grad.split(DIM, dim=1), strict=True))


def build(kind: str) -> Interaction:
    torch.manual_seed(1)
    return DotInteraction(FEATURES) if kind == "dot" else CrossInteraction(FEATURES, DIM, num_layers=2, low_rank=3)


@pytest.mark.parametrize("order", ORDERS)
def test_the_fused_dot_product_equals_the_plain_one(order: tuple[str, ...]) -> None:
    fused, plain = run(DotInteraction(FEATURES), order), run(DotInteraction(FEATURES, fused=False), order)
    torch.testing.assert_close(fused[0], plain[0], rtol=0, atol=1e-6, msg="the output differs")
    torch.testing.assert_close(fused[1], plain[1], rtol=0, atol=2e-6, msg="the dense gradient differs")
    for feature in FEATURES:
        torch.testing.assert_close(
            fused[2][feature], plain[2][feature], rtol=0, atol=2e-6, msg=f"gradient of {feature}"
        )


def test_the_dot_interaction_is_the_dense_vector_and_all_pairs_in_canonical_order() -> None:
    dense, sparse = inputs()
    vectors = [dense, *(sparse[f] for f in FEATURES)]
    pairs = [(left * right).sum(1, keepdim=True) for left, right in itertools.combinations(vectors, 2)]
    out, _, _ = run(DotInteraction(FEATURES), ORDERS[0])
    torch.testing.assert_close(out, torch.cat([dense, *pairs], dim=1), rtol=0, atol=1e-5)


def test_the_fused_gradient_equals_the_numerical_one() -> None:
    dense = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    sparse = torch.randn(3, 3 * 5, dtype=torch.float64, requires_grad=True)
    chosen, pair = DotInteraction(("a", "b", "c"))._pair_indices((2, 0, 1), torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda d, s: _DenseAndPairs.apply(d, s, chosen, pair), (dense, sparse))


@pytest.mark.parametrize("kind", ["dot", "dcn"])
@pytest.mark.parametrize("order", ORDERS[1:])
def test_the_order_of_the_features_changes_nothing(kind: str, order: tuple[str, ...]) -> None:
    canonical, permuted = run(build(kind), ORDERS[0]), run(build(kind), order)
    torch.testing.assert_close(
        permuted[0], canonical[0], rtol=0, atol=1e-6, msg="the next layer would read other columns"
    )
    torch.testing.assert_close(permuted[1], canonical[1], rtol=0, atol=2e-6, msg="the dense gradient differs")
    for feature in FEATURES:
        torch.testing.assert_close(
            permuted[2][feature], canonical[2][feature], rtol=0, atol=2e-6, msg=f"gradient of {feature}"
        )


@pytest.mark.parametrize("kind", ["dot", "dcn"])
def test_a_module_follows_a_changed_plan(kind: str) -> None:
    module = build(kind)
    first = run(module, ORDERS[0])[0]
    for order in (*ORDERS[1:], ORDERS[0]):
        torch.testing.assert_close(
            run(module, order)[0], first, rtol=0, atol=1e-6, msg="it used the order of an earlier plan"
        )


@pytest.mark.parametrize(("kind", "columns"), [("dot", DIM + 10), ("dcn", 5 * DIM)])
def test_output_dim_is_the_number_of_columns(kind: str, columns: int) -> None:
    module = build(kind)
    assert module.output_dim(DIM) == columns
    assert run(module, ORDERS[0])[0].shape == (BATCH, columns)


def test_the_precision_of_the_dense_vector_determines_that_of_the_products() -> None:
    dense, sparse = inputs()
    pooled = KeyedTensor(list(FEATURES), [DIM] * 4, torch.cat([sparse[f] for f in FEATURES], dim=1))
    assert DotInteraction(FEATURES)(dense.bfloat16(), pooled).dtype == torch.bfloat16, (
        "fp32 products would waste bf16 units"
    )


def test_the_option_selects_the_fused_or_the_plain_product() -> None:
    losses = {}
    for fused in (True, False):
        config = tiny({"train.fused_interaction": fused})
        interaction = build_model(config, "fp32").top_tower.interaction
        assert isinstance(interaction, DotInteraction)
        assert interaction.fused is fused
        losses[fused] = first_steps({"train.fused_interaction": fused})
    assert losses[True] == pytest.approx(losses[False], abs=1e-6)
