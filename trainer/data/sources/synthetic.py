"""Synthetic clicks from a known model: every value depends on (seed, split, index), and the best AUC is known.

Shapes: B samples, D dense features, F sparse features, N ids per feature and sample, K = 4 the rank of a factor table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import TrainConfig
from trainer.data.auc import area_under_curve
from trainer.data.base import Batch, SourceContext, Split, jagged_batch, one_id_batch
from trainer.data.sources.counter_random import UNIT, column_salts, random_words, sample_keys, seed_word

# The reference model has 13 dense and 26 sparse features; other numbers keep the variance of the logit.
ID_STD, FACTOR_STD, DENSE_STD, FACTOR_GAIN, RANK = 0.35, 0.35, 0.2, 2.0, 4
REFERENCE_DENSE, REFERENCE_SPARSE = 13, 26
MEAN_LOGIT = -1.0  # gives about 35 % clicks
WEIGHT_ROWS = 1 << 17  # ids that are equal modulo this share weights, which limits the memory of large tables
STREAMS: dict[Split | str, int] = {"train": 0, "eval": 1, "probe": 2}
PROBE_SAMPLES = 16_384
CHUNK = 2_048  # samples computed at once on a CPU, so that temporaries stay in its L2 cache


@dataclass(frozen=True)
class PlantedModel:
    """The true model: z = bias + x.w + sum_f w_f(ids_f) + 2 U_0(ids_0).U_1(ids_1) + 2 U_2(ids_2).U_3(ids_3).

    A function of N ids is its sum over them divided by sqrt(N), so that N does not change the variance of the logit.
    The pairs of factor tables need 2 and 4 sparse features; with fewer features they are omitted.
    """

    dense_D: Tensor
    ids_R: Tensor  # weights of all features, concatenated
    offsets_F11: Tensor  # index of each feature's first weight
    factors: tuple[Tensor, ...]  # 0, 2 or 4 tables, each (rows, K)
    bias: float

    @staticmethod
    def draw(config: TrainConfig) -> PlantedModel:
        """Draw the weights of `data.seed`, with bias 0; on the CPU, so that they are equal for every device."""
        generator = torch.Generator().manual_seed(config.data.seed % 2**63)
        num_dense, num_sparse = len(config.data.dense_features), len(config.data.sparse_features)
        rows = [min(r, WEIGHT_ROWS) for r in config.rows_per_table]
        id_std = ID_STD * math.sqrt(REFERENCE_SPARSE / num_sparse)
        dense_std = DENSE_STD * math.sqrt(REFERENCE_DENSE / num_dense)
        ids_R = torch.randn(sum(rows), generator=generator).mul_(id_std)
        dense_D = torch.randn(num_dense, generator=generator).mul_(dense_std)
        num_factors = min(4, num_sparse // 2 * 2)
        factors = tuple(torch.randn(r, RANK, generator=generator).mul_(FACTOR_STD) for r in rows[:num_factors])
        offsets = torch.tensor([0, *rows[:-1]]).cumsum(0)
        return PlantedModel(dense_D, ids_R, offsets[:, None, None], factors, 0.0)

    def to(self, device: torch.device, bias: float) -> PlantedModel:
        """Return the same weights on `device`, with another bias."""
        factors = tuple(f.to(device) for f in self.factors)
        return PlantedModel(self.dense_D.to(device), self.ids_R.to(device), self.offsets_F11.to(device), factors, bias)

    def logits(self, dense_BD: Tensor, ids_FNB: Tensor) -> Tensor:
        """Return the true logits z, (B,) float32."""
        num_ids, num_samples = ids_FNB.shape[1:]
        slots_FNB = ids_FNB & (WEIGHT_ROWS - 1)
        logits_B = torch.full((num_samples,), self.bias, device=dense_BD.device).addmv_(dense_BD, self.dense_D)
        for f in range(0, len(self.factors), 2):
            left_BK, right_BK = (_rows_sum(self.factors[g], slots_FNB[g]) for g in (f, f + 1))
            logits_B.add_(left_BK.mul_(right_BK).sum(1), alpha=FACTOR_GAIN / num_ids)
        cells = slots_FNB.add_(self.offsets_F11).view(-1)
        weights = self.ids_R.index_select(0, cells).view(-1, num_samples)
        return logits_B.add_(weights.sum(0), alpha=num_ids**-0.5)


class SyntheticSource:
    """Endless samples of a `PlantedModel`, created on the context's device.

    Dense values are uniform in 0..1. Ids are Zipf-like: floor((R + 1)^u) - 1 with u uniform, for a table of R rows.
    The label is 1 with probability sigmoid(z). All devices and world sizes give the same stream, up to rounding of
    floating-point functions.
    """

    samples_per_epoch: int | None = None

    def __init__(self, context: SourceContext) -> None:
        config = context.config
        self._device = context.device
        self._seed, self._stream = seed_word(config.data.seed), STREAMS[context.split]
        self._features = config.data.sparse_features
        self._num_dense, self._num_ids = len(config.data.dense_features), config.data.ids_per_feature
        num_columns = self._num_dense + 1 + len(self._features) * self._num_ids
        self._salts_C1 = column_salts(num_columns, self._device)
        log_rows_F11 = torch.tensor(config.rows_per_table, dtype=torch.float64).add_(1).log2_()[:, None, None]
        self._log_rows_F11 = (log_rows_F11 * UNIT).to(self._device)  # per unit of a random word
        self._half_log_rows_F11 = (log_rows_F11 * (0.5 + UNIT / 2)).to(self._device)
        self._model = PlantedModel.draw(config).to(self._device, bias=0.0)
        self._model = self._model.to(self._device, bias=MEAN_LOGIT - self._mean_probe_logit())

    def read(self, position: int, count: int) -> Batch:
        """Return samples `position` .. `position + count - 1` on the context's device."""
        dense_BD, ids_FNB, labels_B, _ = self._samples(position, count)
        if self._num_ids == 1:
            return one_id_batch(self._features, None, dense_BD, ids_FNB[:, 0], labels_B, position)
        ids_FV = ids_FNB.transpose(1, 2).reshape(len(self._features), -1)
        lengths_B = torch.full((count,), self._num_ids, dtype=torch.int32, device=self._device)
        return jagged_batch(
            self._features, None, dense_BD, list(ids_FV), [lengths_B] * len(self._features), labels_B, position
        )

    def best_auc(self, count: int) -> float:
        """Return the AUC of the true probabilities on the first `count` samples of the split."""
        _, _, labels_B, logits_B = self._samples(0, count)
        return area_under_curve(logits_B, labels_B)

    def _samples(self, position: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return dense values (B, D), ids (F, N, B), labels and true logits (B,)."""
        chunk = CHUNK if self._device.type == "cpu" else count
        end = position + count
        pieces = [self._piece(self._stream, start, min(chunk, end - start)) for start in range(position, end, chunk)]
        if len(pieces) == 1:
            return pieces[0]
        dense, ids, labels, logits = zip(*pieces, strict=True)
        return torch.cat(dense), torch.cat(ids, dim=2), torch.cat(labels), torch.cat(logits)

    def _piece(self, stream: int, position: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute samples in one step, as `_samples` returns them."""
        keys_B = sample_keys(self._seed, stream, len(STREAMS), position, count, self._device)
        words_CB = random_words(keys_B, self._salts_C1)
        coins_and_dense = words_CB[: 1 + self._num_dense].to(torch.float32).mul_(UNIT).add_(0.5)
        words_FNB = words_CB[1 + self._num_dense :].view(len(self._features), self._num_ids, count)
        # (R + 1)^u in float64 with u at least 2^-33 below 1, so that an id never reaches R.
        powers_FNB = torch.mul(words_FNB, self._log_rows_F11).add_(self._half_log_rows_F11).exp2_()
        ids_FNB = powers_FNB.sub_(1).to(torch.int64)
        dense_BD = coins_and_dense[1:].t().contiguous()
        logits_B = self._model.logits(dense_BD, ids_FNB)
        labels_B = (coins_and_dense[0] < logits_B.sigmoid()).to(torch.float32)
        return dense_BD, ids_FNB, labels_B, logits_B

    def _mean_probe_logit(self) -> float:
        """Return the mean logit of samples in no split, which the bias subtracts to fix the base rate."""
        *_, logits_B = self._piece(STREAMS["probe"], 0, PROBE_SAMPLES)
        return float(logits_B.mean())


def _rows_sum(factor: Tensor, slots_NB: Tensor) -> Tensor:
    """Return the sum of the rows of each sample's N ids, (B, K)."""
    rows = factor.index_select(0, slots_NB.reshape(-1)).view(*slots_NB.shape, RANK)
    return rows[0] if rows.shape[0] == 1 else rows.sum(0)
