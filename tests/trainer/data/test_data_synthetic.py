"""The synthetic clicks: their distribution, the true model and the best AUC."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from data_samples import CPU, config_of, source_of
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]

from trainer.data import KnowsBestAuc, SourceContext
from trainer.data.auc import area_under_curve
from trainer.data.base import Split
from trainer.data.sources.counter_random import column_salts, random_words, sample_keys, seed_word
from trainer.data.sources.synthetic import MEAN_LOGIT, WEIGHT_ROWS, PlantedModel, SyntheticSource

MANY = 65_536
LOW32, LOW64 = 2**32 - 1, 2**64 - 1


def synthetic(
    num_embeddings: Any = 10_000, split: Split = "eval", device: torch.device = CPU, **data: Any
) -> SyntheticSource:
    return SyntheticSource(SourceContext(config_of(data, num_embeddings), split, device))


def reference_key(seed: int, counter: int) -> int:
    return mix64(counter + mix64(seed + 1) & LOW64)


def mix64(value: int) -> int:
    value = value * 0x9E3779B97F4A7C15 & LOW64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & LOW64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & LOW64
    return value ^ value >> 31


def lowbias32_without_last_shift(value: int) -> int:
    value = (value ^ value >> 16) * 0x7FEB352D & LOW32
    return (value ^ value >> 15) * 0x846CA68B & LOW32


def reference_word(seed: int, stream: int, index: int, column: int) -> int:
    key = reference_key(seed, index * 3 + stream)
    word = lowbias32_without_last_shift((key ^ mix64(column)) & LOW32)
    word = lowbias32_without_last_shift(word + (key >> 32) & LOW32)
    return word ^ word >> 16


@pytest.mark.parametrize(("seed", "stream", "start"), [(0, 0, 0), (1, 1, 12_345), (7, 2, 2**40)])
def test_random_words_equal_those_of_the_published_mixers(seed: int, stream: int, start: int) -> None:
    words_CB = random_words(sample_keys(seed_word(seed), stream, 3, start, 50, CPU), column_salts(9, CPU))
    expected = [[reference_word(seed, stream, start + i, c) for i in range(50)] for c in range(9)]
    assert [[word & LOW32 for word in row] for row in words_CB.tolist()] == expected


def test_the_streams_of_a_seed_share_no_key() -> None:
    keys = torch.cat([sample_keys(seed_word(5), stream, 3, 0, 10_000, CPU) for stream in range(3)])
    assert len(set(keys.tolist())) == 30_000


def test_the_columns_of_random_words_are_uniform_and_uncorrelated() -> None:
    words_CB = random_words(sample_keys(seed_word(1), 0, 3, 0, 100_000, CPU), column_salts(40, CPU))
    uniform_CB = words_CB.double() / 2**32 + 0.5
    assert torch.allclose(uniform_CB.mean(1), torch.tensor(0.5).double(), atol=5 * math.sqrt(1 / 12 / 100_000))
    correlation = torch.corrcoef(uniform_CB) - torch.eye(40).double()
    assert correlation.abs().max() < 6 / math.sqrt(100_000), "six standard deviations"


def test_a_seed_may_be_any_number_of_0_or_more() -> None:
    batches = [synthetic(seed=seed).read(0, 100) for seed in (0, 2**62, 2**80 + 7)]
    assert len({float(batch.dense_BD.sum()) for batch in batches}) == 3


def test_dense_values_are_uniform_between_0_and_1() -> None:
    dense_BD = synthetic().read(0, MANY).dense_BD
    assert dense_BD.min() >= 0
    assert dense_BD.max() <= 1
    assert torch.allclose(dense_BD.mean(0), torch.tensor(0.5), atol=0.01)
    assert torch.allclose(dense_BD.std(0), torch.tensor(12**-0.5), atol=0.01)


def test_ids_follow_their_declared_distribution() -> None:
    ids = synthetic(num_embeddings=100).read(0, MANY).sparse["cat_3"].values()
    share = torch.bincount(ids, minlength=100) / MANY
    expected = torch.tensor([math.log((i + 2) / (i + 1)) / math.log(101) for i in range(100)])
    assert torch.allclose(share, expected, atol=0.006)


@pytest.mark.parametrize("rows", [1, 2, 3, 10])
def test_ids_cover_every_row_of_a_small_table_and_none_outside(rows: int) -> None:
    ids = synthetic(num_embeddings=rows).read(0, 4_096).sparse.values()
    assert sorted(set(ids.tolist())) == list(range(rows))


def test_tables_of_40_million_rows_share_weights() -> None:
    source = synthetic(num_embeddings="criteo-1tb")
    ids = source.read(0, MANY).sparse["cat_0"].values()
    assert 30_000_000 < int(ids.max()) < 40_000_000
    assert source._model.ids_R.numel() <= 26 * WEIGHT_ROWS


@pytest.mark.parametrize("seed", range(1, 6))
def test_about_35_percent_are_clicks_for_every_seed(seed: int) -> None:
    rate = synthetic(seed=seed).read(0, MANY).labels_B.mean()
    assert rate == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize("ids_per_feature", [1, 3])
def test_the_logit_equals_the_documented_formula(ids_per_feature: int) -> None:
    config = config_of({"num_sparse": 5, "num_dense": 3, "ids_per_feature": ids_per_feature}, 50)
    model, draw = PlantedModel.draw(config), torch.Generator().manual_seed(3)
    dense = torch.rand(1, 3, generator=draw)
    ids = torch.randint(0, 50, (5, ids_per_feature, 1), generator=draw)
    scale = 1 / math.sqrt(ids_per_feature)
    weights = model.ids_R.view(5, 50)
    expected = float(dense[0] @ model.dense_D)
    expected += sum(float(weights[f, int(i)]) * scale for f in range(5) for i in ids[f, :, 0])
    parts = [table[ids[f, :, 0]].sum(0) * scale for f, table in enumerate(model.factors)]
    expected += float(2 * parts[0] @ parts[1] + 2 * parts[2] @ parts[3])
    assert float(model.logits(dense, ids)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("num_sparse", "pairs"), [(1, 0), (2, 1), (3, 1), (4, 2), (26, 2)])
def test_pairs_of_features_interact_if_there_are_enough(num_sparse: int, pairs: int) -> None:
    model = PlantedModel.draw(config_of({"num_sparse": num_sparse}, 10))
    assert len(model.factors) == 2 * pairs


def test_labels_have_the_probability_of_the_true_model() -> None:
    _, _, labels_B, logits_B = synthetic()._samples(0, MANY)
    probability_B = logits_B.sigmoid()
    assert float(logits_B.mean()) == pytest.approx(MEAN_LOGIT, abs=0.05)
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        chosen = (probability_B >= low) & (probability_B < low + 0.2)
        assert labels_B[chosen].mean() == pytest.approx(float(probability_B[chosen].mean()), abs=0.02)


def test_the_best_auc_equals_that_of_the_reference_model() -> None:
    assert synthetic().best_auc(MANY) == pytest.approx(0.8565, abs=0.005), "reference: 13 and 26 features, 10,000 rows"


@pytest.mark.parametrize("data", [{"ids_per_feature": 3}, {"num_sparse": 8, "num_dense": 4}])
def test_other_shapes_are_about_as_hard(data: dict[str, Any]) -> None:
    assert synthetic(**data).best_auc(MANY) == pytest.approx(0.855, abs=0.02)


def test_the_best_auc_is_computed_from_the_labels_that_read_returns() -> None:
    source = synthetic()
    assert isinstance(source, KnowsBestAuc)
    _, _, _, logits_B = source._samples(0, 5_000)
    assert source.best_auc(5_000) == pytest.approx(roc_auc_score(source.read(0, 5_000).labels_B, logits_B), abs=1e-9)


def test_the_area_under_the_curve_counts_ties_half() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 20, (3_000,), generator=draw).float()
    labels = (torch.rand(3_000, generator=draw) < scores / 30).float()
    assert area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_area_under_the_curve_of_one_class_is_one_half(label: float) -> None:
    assert area_under_curve(torch.rand(9), torch.full((9,), label)) == 0.5


def test_every_feature_has_the_configured_number_of_ids() -> None:
    sparse = source_of(config_of({"num_sparse": 2, "ids_per_feature": 3})).read(0, 11).sparse
    assert sparse.lengths().tolist() == [3] * 22


def test_synthetic_samples_have_no_end() -> None:
    assert synthetic().samples_per_epoch is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("ids_per_feature", [1, 3])
def test_a_gpu_creates_the_same_samples_up_to_rounding(ids_per_feature: int) -> None:
    on_host = synthetic(ids_per_feature=ids_per_feature).read(10**9, 10_000)
    on_gpu = synthetic(ids_per_feature=ids_per_feature, device=torch.device("cuda")).read(10**9, 10_000)
    assert on_gpu.dense_BD.is_cuda
    assert torch.equal(on_gpu.dense_BD.cpu(), on_host.dense_BD)
    same_ids = on_gpu.sparse.values().cpu() == on_host.sparse.values()
    assert same_ids.double().mean() > 0.9999
    assert (on_gpu.labels_B.cpu() == on_host.labels_B).double().mean() > 0.999
