"""Row-wise Adagrad fused into the backward pass of the tables on CPU, several times faster than fbgemm's kernel.

fbgemm's CPU kernel sums the gradients of this optimizer number by number. This one sorts the lookups by row and sums
their gradients with PyTorch's embedding-bag kernel, one vector at a time. The update is the same: with g the sum of a
row's gradients and D columns, sum += mean(g^2), row -= rate / (sqrt(sum) + eps) g (Gupta et al. 2014; fbgemm's
rowwise_adagrad). It runs in the backward pass, so the gradient of a whole table is never in memory.

Shapes: T tables of this process, each with D columns, B samples of all processes, V ids, U distinct rows.
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
    """Replace the update of fbgemm's `kernels` as `optim.sparse.update` selects; return the name of the update in use.

    Raises UserError if `coalesced` is selected but the device or the optimizer does not support it.
    """
    if config.update == "fbgemm":
        return "fbgemm"
    supported = device.type == "cpu" and config.optimizer == "rowwise_adagrad"
    if config.update == "coalesced" and not supported:
        raise UserError(
            f"optim.sparse.update is coalesced, which supports only rowwise_adagrad on CPU, but the optimizer is "
            f"{config.optimizer} on {device.type}; allowed: auto, fbgemm"
        )
    replaced = [kernel for kernel in kernels if supported and _is_uniform(kernel)]
    for kernel in replaced:
        kernel.forward = CoalescedUpdate(kernel)
    if not replaced:
        return "fbgemm"
    return "coalesced" if len(replaced) == len(kernels) else "coalesced, fbgemm"


def _is_uniform(kernel: Any) -> bool:
    """Return whether all tables have the same number of columns, so that their rows form one matrix."""
    return (
        len({dim for _, dim, *_ in kernel.embedding_specs}) == 1
        and kernel.pooling_mode == PoolingMode.SUM
        and kernel.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        and kernel.weights_host.dtype == torch.float32
    )


class CoalescedUpdate:
    """The replacement of a kernel's `forward`: the kernel's lookup, then this module's update in the backward pass."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._lookup = kernel, kernel.forward
        self.columns: int = kernel.embedding_specs[0][1]
        self._first_rows = [int(at) // self.columns for at in kernel.weights_offsets.tolist()]
        self._trigger = torch.empty(0, requires_grad=True)  # autograd skips a function without such an input

    def __call__(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return the sums of rows (B, T D) for (V) ids and the (T B + 1) offsets of each sample's first id."""
        assert per_sample_weights is None, "no source has weights per id"
        with torch.no_grad():
            pooled: Tensor = self._lookup(indices=indices, offsets=offsets)  # it also sets invalid ids to 0, in place
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
        """Return for each lookup its row in all tables of this process, and its vector in the gradient as (B T, D)."""
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
        return (rows_V.int() if small else rows_V), vectors_V  # sorting 32 bits is twice as fast


class _Update(torch.autograd.Function):
    """An identity whose backward pass gives the gradient to the update."""

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, pooled_BTD: Tensor, indices_V: Tensor, offsets: Tensor, update: CoalescedUpdate
    ) -> Tensor:
        """Return the sums unchanged."""
        ctx.save_for_backward(indices_V, offsets)
        ctx.update = update
        return pooled_BTD.view_as(pooled_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None, None]:
        """Update the tables with the gradient (B, T D) and return no gradients."""
        indices_V, offsets = ctx.saved_tensors
        ctx.update.apply(gradients[0].contiguous(), indices_V, offsets)
        return None, None, None, None, None
