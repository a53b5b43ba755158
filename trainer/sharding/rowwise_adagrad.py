"""Row-wise Adagrad inside the backward pass of the tables on CPU, several times quicker than fbgemm's own kernel.

fbgemm's CPU kernel adds up the gradients of this optimizer number by number. Here they are added up by PyTorch's
embedding-bag kernel, a vector at a time, after the lookups are sorted by row. The update is the same: with g the sum of
a row's gradients and D columns, sum += mean(g^2), row -= rate / (sqrt(sum) + eps) g (Gupta et al. 2014; fbgemm's
rowwise_adagrad). It runs right after the gradients have come, and no gradient of a table is ever whole in memory.

Shapes: T tables of this process, each with D columns, B samples of all processes, V ids, U rows that they name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-untyped]  # has no types at all
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode  # type: ignore[import-untyped]
from torch import Tensor

from trainer.config import SparseOptimConfig
from trainer.errors import UserError


def use_coalesced_update(kernels: Sequence[Any], config: SparseOptimConfig, device: torch.device) -> str:
    """Give fbgemm's `kernels` of a sharded model the quick update where `optim.sparse.update` wants it; what they have.

    Raises UserError where it is asked for by name and the device or the optimizer is another one.
    """
    if config.update == "fbgemm":
        return "fbgemm"
    suits = device.type == "cpu" and config.optimizer == "rowwise_adagrad"
    if config.update == "coalesced" and not suits:
        raise UserError(
            f"optim.sparse.update is coalesced, which is there for rowwise_adagrad on CPU, but the optimizer is "
            f"{config.optimizer} on {device.type}; legal here: auto, fbgemm"
        )
    able = [kernel for kernel in kernels if suits and _is_uniform(kernel)]
    for kernel in able:
        kernel.forward = CoalescedUpdate(kernel)
    return "coalesced" if len(able) == len(kernels) and able else "coalesced, fbgemm" if able else "fbgemm"


def _is_uniform(kernel: Any) -> bool:
    """Whether rows of all its tables have one length, so that all of them are rows of one matrix."""
    return (
        len({dim for _, dim, *_ in kernel.embedding_specs}) == 1
        and kernel.pooling_mode == PoolingMode.SUM
        and kernel.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        and kernel.weights_host.dtype == torch.float32
    )


class CoalescedUpdate:
    """What takes the place of a kernel's `forward`: its own lookup, then our update when the gradients come."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._lookup = kernel, kernel.forward
        self.columns: int = kernel.embedding_specs[0][1]
        self._first_rows = [int(at) // self.columns for at in kernel.weights_offsets.tolist()]
        self._trigger = torch.empty(0, requires_grad=True)  # without an input that needs a gradient, none would come

    def __call__(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """(V) ids, (T B + 1) where each sample's begin -> (B, T D) sums of their rows."""
        assert per_sample_weights is None, "no source has weights of ids"
        with torch.no_grad():
            pooled: Tensor = self._lookup(indices=indices, offsets=offsets)  # it also puts bad ids to 0, in place
        return _Update.apply(self._trigger, pooled, indices, offsets, self) if torch.is_grad_enabled() else pooled

    def apply(self, gradient_BTD: Tensor, indices_V: Tensor, offsets: Tensor) -> None:
        """Update the rows that were looked up."""
        kernel, columns = self._kernel, self.columns
        rows_V, vectors_V = self._lookups(gradient_BTD.shape[0], indices_V, offsets)
        sorted_V, order_V = rows_V.sort(stable=True)
        begins = torch.ones(sorted_V.numel(), dtype=torch.bool)
        torch.ne(sorted_V[1:], sorted_V[:-1], out=begins[1:])
        begins_U = begins.nonzero().view(-1)
        rows_U = sorted_V[begins_U].long()
        sums_UD = F.embedding_bag(vectors_V[order_V], gradient_BTD.view(-1, columns), begins_U, mode="sum")
        state = kernel.momentum1_host
        state_U = state[rows_U].add_(torch.linalg.vecdot(sums_UD, sums_UD), alpha=1 / columns)
        state.index_copy_(0, rows_U, state_U)
        factors_U = kernel.learning_rate_tensor.float().neg() / state_U.sqrt_().add_(kernel.optimizer_args.eps)
        kernel.weights_host.data.view(-1, columns).index_add_(0, rows_U, sums_UD.mul_(factors_U.unsqueeze(1)))

    def _lookups(self, samples: int, indices_V: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Of each lookup its row in all tables of this process, and its vector in the gradient seen as (B T, D)."""
        tables = len(self._first_rows)
        bags_TB = torch.arange(samples) * tables + torch.arange(tables).unsqueeze(1)
        firsts_TB = torch.tensor(self._first_rows).unsqueeze(1).expand(tables, samples)
        if indices_V.numel() == tables * samples and bool((offsets[1:] - offsets[:-1] == 1).all()):
            vectors_V, rows_V = bags_TB.view(-1), indices_V + firsts_TB.reshape(-1)
        else:
            lengths = offsets.diff()
            vectors_V = bags_TB.view(-1).repeat_interleave(lengths)
            rows_V = indices_V + firsts_TB.reshape(-1).repeat_interleave(lengths)
        small = self._kernel.momentum1_host.numel() < 2**31
        return (rows_V.int() if small else rows_V), vectors_V  # 32 bits are sorted twice as fast


class _Update(torch.autograd.Function):
    """Passes sums through, and hands their gradient to the update instead of to a tensor."""

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, pooled_BTD: Tensor, indices_V: Tensor, offsets: Tensor, update: CoalescedUpdate
    ) -> Tensor:
        """The sums as they are."""
        ctx.save_for_backward(indices_V, offsets)
        ctx.update = update
        return pooled_BTD.view_as(pooled_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None, None]:
        """(B, T D) -> nothing: the tables have changed."""
        indices_V, offsets = ctx.saved_tensors
        ctx.update.apply(gradients[0].contiguous(), indices_V, offsets)
        return None, None, None, None, None
