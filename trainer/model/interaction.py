"""How the dense vector and the pooled embeddings meet: pairwise dot products, or a low-rank cross network.

Shapes: B samples, F sparse features, D embedding_dim, K = F + 1 vectors of a sample (the dense one first), P = K (K -
1) / 2 pairs. TorchRec hands over the features in the order of its sharding plan; both interactions put them in the
canonical order, because the weights of the layer behind them must mean the same under every plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.sparse.jagged_tensor import KeyedTensor


class FeatureOrder(nn.Module):
    """Where each canonical feature stands in the output of the sharded embedding collection."""

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features
        self._seen: list[str] | None = None
        self._position: tuple[int, ...] = ()

    def positions(self, keys: list[str]) -> tuple[int, ...]:
        """For canonical feature f its row in an output whose rows are `keys`."""
        if keys != self._seen:
            row = {key: i for i, key in enumerate(keys)}
            self._position = tuple(row[feature] for feature in self.features)
            self._seen = list(keys)
        return self._position


class DotInteraction(FeatureOrder):
    """Dense vector and the P dot products of all pairs: (B, D), F x (B, D) -> (B, D + P). Naumov et al. 2019, section
    2.1."""

    def __init__(self, features: tuple[str, ...], fused: bool = True) -> None:
        super().__init__(features)
        self.fused = fused
        self._pairs: tuple[Tensor, Tensor] | None = None
        self._pairs_of: tuple[int, ...] = ()

    def output_dim(self, embedding_dim: int) -> int:
        """Columns of the result."""
        k = len(self.features) + 1
        return embedding_dim + k * (k - 1) // 2

    def forward(self, dense_BD: Tensor, pooled: KeyedTensor) -> Tensor:
        """(B, D) and a KeyedTensor of F features with D columns each -> (B, D + P)."""
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
        """Where in the K x K products the canonical pairs i < j are (P); for each product its pair (K K), any for the
        diagonal."""
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
    """The dense vector beside the dot products of chosen pairs, with one matrix product forward and one backward.

    Z = C C^T is symmetric, so with G holding the incoming gradient at both (i, j) and (j, i) and zero on the diagonal
    dL/dC = G C. Autograd of the plain form needs two products, a scatter into K x K with duplicates, and copies where
    the vectors are put together and taken apart.
    """

    @staticmethod
    def forward(ctx: Any, dense_BD: Tensor, sparse_BFD: Tensor, chosen_P: Tensor, pair_KK: Tensor) -> Tensor:
        """(B, D), F vectors side by side (B, F D), indices (P) and (K K) -> (B, D + P) in the dense vector's type."""
        batch_size, dim = dense_BD.shape
        combined_BKD = torch.cat([dense_BD, sparse_BFD.to(dense_BD.dtype)], dim=1).view(batch_size, -1, dim)
        ctx.save_for_backward(combined_BKD, pair_KK)
        ctx.sparse_type = sparse_BFD.dtype
        pairs_BP = torch.bmm(combined_BKD, combined_BKD.mT).flatten(1).index_select(1, chosen_P)
        return torch.cat([dense_BD, pairs_BP], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """(B, D + P) -> (B, D), (B, F D)."""
        combined_BKD, pair_KK = ctx.saved_tensors
        batch_size, k, dim = combined_BKD.shape
        symmetric_BKK = gradients[0][:, dim:].index_select(1, pair_KK).view(batch_size, k, k)
        symmetric_BKK.diagonal(dim1=1, dim2=2).zero_()
        # Views, not copies: whoever sends the gradients on reads them in pieces anyway.
        found_BKD = torch.bmm(symmetric_BKK, combined_BKD).flatten(1)
        return found_BKD[:, :dim] + gradients[0][:, :dim], found_BKD[:, dim:].to(ctx.sparse_type), None, None


class CrossInteraction(FeatureOrder):
    """Low-rank cross network v2 over all K vectors side by side: -> (B, K D). Wang et al. 2021, section 3.2."""

    def __init__(self, features: tuple[str, ...], embedding_dim: int, num_layers: int, low_rank: int) -> None:
        super().__init__(features)
        self.cross = LowRankCrossNet((len(features) + 1) * embedding_dim, num_layers, low_rank)

    def output_dim(self, embedding_dim: int) -> int:
        """Columns of the result."""
        return (len(self.features) + 1) * embedding_dim

    def forward(self, dense_BD: Tensor, pooled: KeyedTensor) -> Tensor:
        """(B, D) and a KeyedTensor of F features with D columns each -> (B, K D)."""
        batch_size, dim = dense_BD.shape
        sparse_BFD = pooled.values().view(batch_size, len(self.features), dim)
        positions = self.positions(pooled.keys())
        if positions != tuple(range(len(positions))):
            sparse_BFD = sparse_BFD[:, list(positions)]
        flat = torch.cat([dense_BD, sparse_BFD.to(dense_BD.dtype).flatten(1)], dim=1)
        crossed: Tensor = self.cross(flat)
        return crossed
