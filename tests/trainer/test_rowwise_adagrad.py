"""The coalesced row-wise Adagrad computes the same tables as fbgemm's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from small_jobs import PLANS, alone, first_steps, tiny
from torch import Tensor

from trainer.errors import UserError
from trainer.sharding.rowwise_adagrad import CoalescedUpdate
from trainer.sharding.sharded_model import build_sharded_model

ROWS, DIM, SAMPLES = (7, 300, 40), 8, 33
EPS = 1e-3


def kernel() -> SplitTableBatchedEmbeddingBagsCodegen:
    kernel_ = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=EPS,
    )
    for f, weights in enumerate(kernel_.split_embedding_weights()):
        weights.copy_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(f)))
    return kernel_


def one_id(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = [torch.randint(0, rows, (SAMPLES,), generator=draw) for rows in ROWS]
    return torch.cat(ids), torch.arange(len(ROWS) * SAMPLES + 1)


def several_ids(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return 0 to 3 ids per sample, sometimes the same one twice."""
    lengths = torch.randint(0, 4, (len(ROWS) * SAMPLES,), generator=draw)
    counts = lengths.view(len(ROWS), -1).sum(1).tolist()
    ids = [torch.randint(0, rows, (n,), generator=draw) for rows, n in zip(ROWS, counts, strict=True)]
    return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def no_id(_: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.int64), torch.zeros(len(ROWS) * SAMPLES + 1, dtype=torch.int64)


@pytest.mark.parametrize("drawn", [one_id, several_ids, no_id])
def test_tables_and_states_equal_those_of_fbgemm(drawn: Callable[[torch.Generator], tuple[Tensor, Tensor]]) -> None:
    fbgemm, ours = kernel(), kernel()
    ours.forward = CoalescedUpdate(ours)
    draw = torch.Generator().manual_seed(5)
    before = [weights.clone() for weights in ours.split_embedding_weights()]
    for step in range(4):
        ids, offsets = drawn(draw)
        gradient = torch.randn(SAMPLES, len(ROWS) * DIM, generator=draw)
        for kernel_ in (fbgemm, ours):
            kernel_.set_learning_rate(0.1 / (step + 1))
            pooled = kernel_(ids.clone(), offsets)
            pooled.backward(gradient)
    for table in range(len(ROWS)):
        torch.testing.assert_close(
            ours.split_embedding_weights()[table], fbgemm.split_embedding_weights()[table], rtol=0, atol=1e-6
        )
    torch.testing.assert_close(ours.momentum1_host, fbgemm.momentum1_host, rtol=1e-6, atol=1e-6)
    changed = [not torch.equal(a, b) for a, b in zip(before, ours.split_embedding_weights(), strict=True)]
    assert changed == [drawn is not no_id] * len(ROWS), "nothing was trained"


def test_a_lookup_without_gradients_changes_nothing() -> None:
    ours = kernel()
    ours.forward = CoalescedUpdate(ours)
    ids, offsets = one_id(torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not ours(ids, offsets).requires_grad
    assert torch.equal(ours(ids, offsets).detach(), kernel()(ids, offsets).detach())


def test_both_updates_train_the_same_and_auto_reports_its_choice() -> None:
    configs = {
        update: {"optim.sparse.update": update} | PLANS["table_wise"] for update in ("auto", "coalesced", "fbgemm")
    }
    losses = {update: first_steps(changes) for update, changes in configs.items()}
    assert losses["auto"] == losses["coalesced"]
    assert losses["coalesced"] == pytest.approx(losses["fbgemm"], abs=1e-6)
    expected = {"auto": "coalesced", "coalesced": "coalesced", "fbgemm": "fbgemm"}
    assert {update: update_of(changes) for update, changes in configs.items()} == expected


def test_other_optimizers_use_fbgemm_and_cannot_select_the_coalesced_update() -> None:
    adagrad = {"optim.sparse.optimizer": "adagrad"} | PLANS["table_wise"]
    assert update_of(adagrad) == "fbgemm"
    with pytest.raises(UserError, match=r"optim\.sparse\.update is coalesced.*adagrad on cpu; allowed: auto, fb"):
        update_of(adagrad | {"optim.sparse.update": "coalesced"})


def update_of(changes: dict[str, Any]) -> str:
    """Return the update that a model with these changes reports."""
    config = tiny(changes)
    with alone(config) as runtime:
        return build_sharded_model(config, runtime).resolved["update"]
