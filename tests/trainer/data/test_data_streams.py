"""The contract of every source: its stream is a pure function of (seed, split, position)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from data_samples import CPU, FINITE, NUM_EVAL, NUM_TRAIN, SOURCES, config_of, samples_of, serials, source_of

from trainer.config import TrainConfig
from trainer.data import Source
from trainer.data.loader import train_batches

BEYOND_INT32 = 2**33


@pytest.fixture(params=SOURCES)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> TrainConfig:
    return SOURCES[request.param](tmp_path)


@pytest.fixture(params=FINITE)
def finite(request: pytest.FixtureRequest, tmp_path: Path) -> TrainConfig:
    return SOURCES[request.param](tmp_path)


def with_data(config: TrainConfig, **data: object) -> TrainConfig:
    tree = config.model_dump()
    return TrainConfig.model_validate(tree | {"data": tree["data"] | data})


def epoch(source: Source, number: int) -> list[int]:
    return serials(source, number * NUM_TRAIN, NUM_TRAIN)


def test_a_sample_does_not_depend_on_the_size_and_start_of_a_read(config: TrainConfig) -> None:
    source, draw = source_of(config), random.Random(0)
    samples = samples_of(source.read(0, 400))
    for _ in range(40):
        position, count = draw.randrange(300), draw.randrange(1, 100)
        assert samples_of(source.read(position, count)) == samples[position : position + count], (position, count)


def test_a_new_source_gives_the_same_samples_in_any_order_of_reading(config: TrainConfig) -> None:
    samples = samples_of(source_of(config).read(0, 400))
    other = source_of(config)
    backwards = [samples_of(other.read(position, 25)) for position in range(375, -25, -25)]
    assert [sample for part in reversed(backwards) for sample in part] == samples


def test_the_stream_continues_beyond_32_bit_positions(config: TrainConfig) -> None:
    source = source_of(config)
    assert samples_of(source.read(BEYOND_INT32, 40))[30:] == samples_of(source.read(BEYOND_INT32 + 30, 10))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_any_number_of_processes_shares_the_same_steps(config: TrainConfig, world_size: int) -> None:
    config = config.model_copy(update={"train": config.train.model_copy(update={"batch_size": 24})})
    expected = samples_of(source_of(config).read(55, 5 * 24))
    ranks = [list(train_batches(source_of(config), config, 55, 5, rank, world_size, CPU)) for rank in range(world_size)]
    actual = [sample for step in zip(*ranks, strict=True) for batch in step for sample in samples_of(batch)]
    assert actual == expected


def test_training_and_evaluation_share_no_sample(config: TrainConfig) -> None:
    train = set(samples_of(source_of(config, "train").read(0, 400)))
    held_out = set(samples_of(source_of(config, "eval").read(0, 400)))
    assert not train & held_out


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "a class of the user"])
def test_another_seed_gives_another_stream(name: str, tmp_path: Path) -> None:
    config = SOURCES[name](tmp_path)
    other = with_data(config, seed=config.data.seed + 1)
    assert samples_of(source_of(config).read(0, 64)) != samples_of(source_of(other).read(0, 64))


def test_a_batch_has_the_declared_shapes_and_types(config: TrainConfig) -> None:
    batch = source_of(config).read(3, 17)
    assert batch.dense_BD.shape == (17, len(config.data.dense_features))
    assert tuple(batch.sparse.keys()) == config.data.sparse_features
    assert batch.sparse.stride() == 17
    assert (batch.dense_BD.dtype, batch.labels_B.dtype) == (torch.float32, torch.float32)
    assert (batch.sparse.values().dtype, batch.sparse.lengths().dtype) == (torch.int64, torch.int32)
    assert batch.sparse.length_per_key() == [int(batch.sparse[f].lengths().sum()) for f in config.data.sparse_features]


def test_an_epoch_has_every_sample_exactly_once(finite: TrainConfig) -> None:
    source = source_of(finite)
    assert source.samples_per_epoch == NUM_TRAIN
    for number in (0, 1, 7):
        assert sorted(epoch(source, number)) == list(range(NUM_TRAIN)), f"epoch {number}"


def test_every_epoch_is_reshuffled(finite: TrainConfig) -> None:
    source = source_of(finite)
    orders = [epoch(source, number) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert list(range(NUM_TRAIN)) not in orders


def test_shuffling_changes_the_order_of_the_blocks(finite: TrainConfig) -> None:
    source = source_of(finite)
    firsts = [epoch(source, number)[0] for number in range(4)]
    assert max(firsts) >= 16, "some epoch starts outside the first block, which has at most 16 rows"


def test_shuffling_changes_the_order_inside_a_block(finite: TrainConfig) -> None:
    source = source_of(finite)
    starts = [epoch(source, number)[:5] for number in range(4)]
    assert any(start != list(range(start[0], start[0] + 5)) for start in starts)


def test_without_shuffling_an_epoch_is_in_the_order_of_the_files(finite: TrainConfig) -> None:
    source = source_of(with_data(finite, shuffle=False))
    assert epoch(source, 0) == epoch(source, 1) == list(range(NUM_TRAIN))


def test_evaluation_is_in_the_order_of_the_files_in_every_round(finite: TrainConfig) -> None:
    source = source_of(finite, "eval")
    expected = list(range(NUM_TRAIN, NUM_TRAIN + NUM_EVAL))
    assert source.samples_per_epoch == NUM_EVAL
    assert serials(source, 0, 2 * NUM_EVAL) == expected * 2


def test_a_class_of_the_user_is_found_by_its_import_path() -> None:
    config = config_of({"source": "data_samples:Countdown", "num_sparse": 1, "num_dense": 1})
    assert serials(source_of(config), 5, 3) == [-5, -6, -7]
