"""Interactions of the dense vector with the pooled embeddings: pairwise dot products, or a low-rank cross network.

Shapes: B samples, F sparse features, D embedding_dim, K = F + 1 vectors per sample (the dense one first),
P = K (K - 1) / 2 pairs. TorchRec outputs the features in the order of its sharding plan. Both interactions restore the
canonical order, because the weights of the next layer must have the same meaning under every plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.sparse.jagged_tensor import KeyedTensor


class FeatureOrder(nn.Module):
    """The position of each canonical feature in the output of the sharded embedding collection."""

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features
        self._keys: list[str] | None = None
        self._positions: tuple[int, ...] = ()

    def positions(self, keys: list[str]) -> tuple[int, ...]:
        """Return for each canonical feature its row in an output with rows `keys`."""
        if keys != self._keys:
            row = {key: i for i, key in enumerate(keys)}
            self._positions = tuple(row[feature] for feature in self.features)
            self._keys = list(keys)
        return self._positions


class DotInteraction(FeatureOrder):
    """The dense vector and P dot products of all pairs: (B, D), F x (B, D) -> (B, D + P) (Naumov et al. 2019, 2.1)."""

    def __init__(self, features: tuple[str, ...], fused: bool = True) -> None:
        super().__init__(features)
        self.fused = fused
        self._pairs: tuple[Tensor, Tensor] | None = None
        self._pairs_of: tuple[int, ...] = ()

    def output_dim(self, embedding_dim: int) -> int:
        """Return the number of columns of the result."""
        k = len(self.features) + 1
        return embedding_dim + k * (k - 1) // 2

    def forward(self, dense_BD: Tensor, pooled: KeyedTensor) -> Tensor:
        """Return (B, D + P) for (B, D) and a KeyedTensor of F features with D columns each."""
        chosen, mirrored = self._pair_indices(self.positions(pooled.keys()), dense_BD.device)
        if self.fused:
            out: Tensor = _DenseAndPairs.apply(dense_BD, pooled.values(), chosen, mirrored)
            return out
        batch_size, dim = dense_BD.shape
        sparse_BFD = pooled.values().view(batch_size, len(self.features), dim)
        combined_BKD = torch.cat([dense_BD.unsqueeze(1), sparse_BFD.to(dense_BD.dtype)], dim=1)
        pairs_BP = torch.bmm(combined_BKD, combined_BKD.mT).flatten(1)[:, chosen]
        return torch.cat([dense_BD, pairs_BP], dim=1)

    def _pair_indices(self, positions: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the products of the pairs i < j among K x K (P), and the pair of each product (K K).

        The pair of a product on the diagonal is arbitrary.
        """
        if self._pairs is None or self._pairs_of != positions or self._pairs[0].device != device:
            row = torch.tensor((0, *(p + 1 for p in positions)), dtype=torch.int64)
            k = row.numel()
            i, j = torch.triu_indices(k, k, offset=1)
            chosen, pair = row[i] * k + row[j], torch.zeros(k * k, dtype=torch.int64)
            pair[chosen] = pair[row[j] * k + row[i]] = torch.arange(chosen.numel())
            self._pairs = (chosen.to(device), pair.to(device))
            self._pairs_of = positions
        return self._pairs


class _DenseAndPairs(torch.autograd.Function):
    """The dense vector and the dot products of chosen pairs, with one matrix product forward and one backward.

    Z = C C^T is symmetric. With G holding the incoming gradient at both (i, j) and (j, i), and zero on the diagonal,
    dL/dC = G C. Autograd of the plain form needs two products, a scatter into K x K with duplicates, and copies to
    concatenate and split the vectors.
    """

    @staticmethod
    def forward(ctx: Any, dense_BD: Tensor, sparse_BFD: Tensor, chosen_P: Tensor, pair_KK: Tensor) -> Tensor:
        """Return (B, D + P) in the dense type for (B, D), F concatenated vectors (B, F D), indices (P) and (K K)."""
        batch_size, dim = dense_BD.shape
        combined_BKD = torch.cat([dense_BD, sparse_BFD.to(dense_BD.dtype)], dim=1).view(batch_size, -1, dim)
        ctx.save_for_backward(combined_BKD, pair_KK)
        ctx.sparse_type = sparse_BFD.dtype
        pairs_BP = torch.bmm(combined_BKD, combined_BKD.mT).flatten(1).index_select(1, chosen_P)
        return torch.cat([dense_BD, pairs_BP], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients (B, D) and (B, F D) for (B, D + P)."""
        combined_BKD, pair_KK = ctx.saved_tensors
        batch_size, k, dim = combined_BKD.shape
        symmetric_BKK = gradients[0][:, dim:].index_select(1, pair_KK).view(batch_size, k, k)
        symmetric_BKK.diagonal(dim1=1, dim2=2).zero_()
        # Views, not copies, because the all-to-all reads the gradients in pieces.
        gradient_BKD = torch.bmm(symmetric_BKK, combined_BKD).flatten(1)
        return gradient_BKD[:, :dim] + gradients[0][:, :dim], gradient_BKD[:, dim:].to(ctx.sparse_type), None, None


class CrossInteraction(FeatureOrder):
    """Low-rank cross network v2 over all K vectors, concatenated to (B, K D) (Wang et al. 2021, section 3.2)."""

    def __init__(self, features: tuple[str, ...], embedding_dim: int, num_layers: int, low_rank: int) -> None:
        super().__init__(features)
        self.cross = LowRankCrossNet((len(features) + 1) * embedding_dim, num_layers, low_rank)

    def output_dim(self, embedding_dim: int) -> int:
        """Return the number of columns of the result."""
        return (len(self.features) + 1) * embedding_dim

    def forward(self, dense_BD: Tensor, pooled: KeyedTensor) -> Tensor:
        """Return (B, K D) for (B, D) and a KeyedTensor of F features with D columns each."""
        batch_size, dim = dense_BD.shape
        sparse_BFD = pooled.values().view(batch_size, len(self.features), dim)
        positions = self.positions(pooled.keys())
        if positions != tuple(range(len(positions))):
            sparse_BFD = sparse_BFD[:, list(positions)]
        flat = torch.cat([dense_BD, sparse_BFD.to(dense_BD.dtype).flatten(1)], dim=1)
        crossed: Tensor = self.cross(flat)
        return crossed
