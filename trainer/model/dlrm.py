"""DLRM over an EmbeddingBagCollection, and the task that adds the loss.

Shapes: B samples, D embedding_dim, F sparse features. The embedding tables are created on the meta device: the sharder
allocates only the shards of each process, and `trainer.sharding.local_shards` fills them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from trainer.config import ModelConfig, TrainConfig
from trainer.data import Batch
from trainer.model.interaction import CrossInteraction, DotInteraction
from trainer.runtime.precision import Precision, autocast


def mlp(sizes: tuple[int, ...], last_is_linear: bool) -> nn.Sequential:
    """Return linear layers with ReLU after each, except after the last one if `last_is_linear`."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(fan_in, fan_out))
        if not (last_is_linear and i == len(sizes) - 2):
            layers.append(nn.ReLU(inplace=True))  # the layer before does not need its output for the backward pass
    return nn.Sequential(*layers)


class DenseTower(nn.Module):
    """Bottom MLP: (B, num_dense) -> (B, D), in the selected precision."""

    def __init__(self, num_dense: int, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.layers = mlp((num_dense, *config.dense_arch), last_is_linear=False)
        self.precision = precision

    def forward(self, dense: Tensor) -> Tensor:
        """Return (B, D) in the autocast type for (B, num_dense) in float32."""
        with autocast(self.precision, dense.device.type):
            out: Tensor = self.layers(dense)
            return out


class TopTower(nn.Module):
    """Interaction and top MLP: (B, D) and F pooled embeddings -> logits (B)."""

    def __init__(
        self, features: tuple[str, ...], config: ModelConfig, precision: Precision, fused: bool = True
    ) -> None:
        super().__init__()
        self.interaction: DotInteraction | CrossInteraction
        if config.interaction == "dot":
            self.interaction = DotInteraction(features, fused)
        else:
            self.interaction = CrossInteraction(
                features, config.embedding_dim, config.dcn_num_layers, config.dcn_low_rank_dim
            )
        in_dim = self.interaction.output_dim(config.embedding_dim)
        self.layers = mlp((in_dim, *config.over_arch), last_is_linear=True)
        self.precision = precision

    def forward(self, dense_BD: Tensor, pooled: KeyedTensor) -> Tensor:
        """Return logits (B) in float32."""
        with autocast(self.precision, dense_BD.device.type):
            logits: Tensor = self.layers(self.interaction(dense_BD, pooled))
        return logits.squeeze(1).float()


class MeanPooling(nn.Module):
    """Divides sums of embeddings by the number of ids of each sample; a sample without ids keeps its zero vector.

    TorchRec's mean pooling is not used: if any table is sharded row-wise, it divides the output of every table, also of
    tables whose kernel has already divided (torchrec 1.9.2, ShardedEmbeddingBagCollection).
    """

    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features

    def forward(self, summed: KeyedTensor, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Return F means in the order of the F pooled sums; the order of the F sparse features may differ."""
        keys = summed.keys()
        row = {feature: f for f, feature in enumerate(sparse.keys())}
        lengths_FB = sparse.lengths().view(len(row), -1)[[row[key] for key in keys]]
        values = summed.values()
        sums_BFD = values.view(lengths_FB.shape[1], len(keys), -1)
        means_BFD = sums_BFD / lengths_FB.t().clamp(min=1).to(values.dtype).unsqueeze(2)
        return KeyedTensor(keys, summed.length_per_key(), means_BFD.flatten(1))


class Dlrm(nn.Module):
    """Deep learning recommendation model (Naumov et al. 2019); only the embedding collection is sharded."""

    def __init__(
        self,
        config: TrainConfig,
        precision: Precision,
        tables_device: torch.device,
        rows: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        features = config.data.sparse_features
        self.embeddings = EmbeddingBagCollection(
            tables=table_configs(config, rows or config.rows_per_table, PoolingType.SUM), device=tables_device
        )
        self.mean_pooling = MeanPooling(features) if config.model.pooling == "mean" else None
        self.dense_tower = DenseTower(len(config.data.dense_features), config.model, precision)
        self.top_tower = TopTower(features, config.model, precision, config.train.fused_interaction)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return logits (B) for dense features (B, num_dense) and F sparse features."""
        pooled = self.embeddings(sparse)
        if self.mean_pooling is not None:
            pooled = self.mean_pooling(pooled, sparse)
        logits: Tensor = self.top_tower(self.dense_tower(dense), pooled)
        return logits


class Loss(nn.Module):
    """Mean binary cross-entropy from logits; a leaf module for the pipeline's tracer."""

    def forward(self, logits_B: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Return the loss, and (loss, logits, labels, weights) detached for the metrics."""
        loss = F.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
        return loss, (loss.detach(), logits_B.detach(), batch.labels_B, batch.weights_B)


class TrainTask(nn.Module):
    """The module that the training pipeline runs: from a batch to its loss and predictions."""

    def __init__(self, model: Dlrm) -> None:
        super().__init__()
        self.model = model
        self.loss = Loss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Return the loss, and (loss, logits, labels, weights) detached for the metrics."""
        logits = self.model(batch.dense_BD, batch.sparse)
        result: tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor | None]] = self.loss(logits, batch)
        return result


def table_configs(config: TrainConfig, rows: tuple[int, ...], pooling: PoolingType) -> list[EmbeddingBagConfig]:
    """Return the configuration of one table per sparse feature, in canonical order."""
    return [
        EmbeddingBagConfig(
            name=table,
            num_embeddings=count,
            embedding_dim=config.model.embedding_dim,
            feature_names=[feature],
            pooling=pooling,
        )
        for table, feature, count in zip(config.table_names, config.data.sparse_features, rows, strict=True)
    ]


def build_model(config: TrainConfig, precision: Precision) -> Dlrm:
    """Return a Dlrm with seeded dense weights on the CPU and tables on the meta device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = Dlrm(config, precision, torch.device("meta"))
    if config.train.compile:
        model.dense_tower.compile()
        model.top_tower.compile()
    return model
