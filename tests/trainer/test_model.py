"""The parts of the model: mean pooling, seeded weights, and the shapes of its layers."""

from __future__ import annotations

import pytest
import torch
from small_jobs import DIM, ROWS, tiny
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from trainer.model.dlrm import Dlrm, MeanPooling, build_model

LENGTHS = {"cat_0": [2, 0, 1], "cat_1": [1, 3, 0], "cat_2": [0, 0, 4]}


def several_ids() -> KeyedJaggedTensor:
    """Return three samples with zero to four ids per feature."""
    lengths = torch.tensor([n for counts in LENGTHS.values() for n in counts], dtype=torch.int32)
    ids = torch.arange(int(lengths.sum())) * 7 % min(ROWS)
    return KeyedJaggedTensor(keys=list(LENGTHS), values=ids, lengths=lengths)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_several_ids_are_pooled_like_torchs_embedding_bag(pooling: str) -> None:
    model = Dlrm(tiny({"model.pooling": pooling}), "fp32", torch.device("cpu"))
    sparse = several_ids()
    pooled = model.embeddings(sparse)
    found = (model.mean_pooling(pooled, sparse) if model.mean_pooling is not None else pooled).to_dict()
    for feature in LENGTHS:
        ids, offsets = sparse[feature].values(), sparse[feature].offsets()[:-1]
        weight = model.embeddings.embedding_bags[f"t_{feature}"].weight
        expected = torch.nn.functional.embedding_bag(ids, weight, offsets, mode=pooling)
        torch.testing.assert_close(found[feature], expected, rtol=1e-6, atol=1e-6, msg=feature)


def test_mean_pooling_follows_the_order_of_the_sums() -> None:
    sparse, order = several_ids(), ["cat_2", "cat_0", "cat_1"]
    sums = KeyedTensor(order, [2] * 3, torch.ones(3, 6))
    found = MeanPooling(tuple(LENGTHS))(sums, sparse)
    assert found.keys() == order
    for feature in order:
        expected = [1 / max(count, 1) for count in LENGTHS[feature]]
        assert found[feature][:, 0].tolist() == pytest.approx(expected), (
            f"{feature} was divided by another feature's counts"
        )


def test_the_seed_determines_the_dense_weights_and_not_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again = (build_model(tiny({"train.seed": 5}), "fp32").dense_tower.state_dict() for _ in range(2))
    other = build_model(tiny({"train.seed": 6}), "fp32").dense_tower.state_dict()
    assert torch.equal(torch.rand(1), expected), "a data source that draws random numbers would see others"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_tables_use_no_memory_until_they_are_sharded() -> None:
    model = build_model(tiny({"model.num_embeddings": 1_000_000_000}), "fp32")
    assert {p.device.type for p in model.embeddings.parameters()} == {"meta"}


def test_the_layers_have_the_configured_sizes() -> None:
    model = build_model(tiny({"model.dense_arch": [12, 10, DIM], "model.over_arch": [6, 5, 1]}), "fp32")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert [shapes[f"dense_tower.layers.{i}.weight"] for i in (0, 2, 4)] == [(12, 4), (10, 12), (DIM, 10)]
    assert [shapes[f"top_tower.layers.{i}.weight"] for i in (0, 2, 4)] == [(6, DIM + 6), (5, 6), (1, 5)]
    assert [shapes[f"embeddings.embedding_bags.t_cat_{i}.weight"] for i in range(3)] == [(r, DIM) for r in ROWS]
