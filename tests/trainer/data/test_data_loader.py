"""Each process's share of the steps, prefetched by a thread that always ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pytest
import torch
from data_samples import CPU, config_of, samples_of, source_of

from trainer.config import TrainConfig
from trainer.data import Batch, Source, one_id_batch
from trainer.data.loader import eval_batches, eval_size, train_batches
from trainer.data.prefetch import prefetch
from trainer.errors import UserError

SECONDS = 30  # generous for a loaded machine; only a broken test waits so long


class Counted:
    """A source whose samples have their position as dense value and as id. `reads` are the requested positions."""

    def __init__(self, samples: int | None = None, fails_at: int | None = None, device: torch.device = CPU) -> None:
        self.samples_per_epoch = samples
        self.fails_at, self.device = fails_at, device
        self.reads: list[int] = []
        self.threads: set[threading.Thread] = set()

    def read(self, position: int, count: int) -> Batch:
        self.threads.add(threading.current_thread())
        self.reads.append(position)
        if self.fails_at is not None and position >= self.fails_at:
            raise UserError(f"sample {position} is bad")
        index_B = torch.arange(position, position + count, device=self.device)
        return one_id_batch(["f"], None, index_B[:, None].float(), index_B[None], torch.zeros_like(index_B).float(), 0)


def config_with(batch_size: int = 8, eval_batch_size: int | None = None, **data: Any) -> TrainConfig:
    return config_of(data, train={"batch_size": batch_size, "eval_batch_size": eval_batch_size})


def positions(batch: Batch) -> list[int]:
    return [int(value) for value in batch.dense_BD[:, 0].tolist()]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trainer-data"]


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait for a condition, and return whether it became true in time."""
    waiting = threading.Event()
    for _ in range(SECONDS * 100):
        if condition():
            return True
        waiting.wait(0.01)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not loader_threads(), "a test left a thread behind"


# --- training --------------------------------------------------------------------------------------------------------


def test_a_rank_reads_its_part_of_each_step_from_the_given_position() -> None:
    batches = train_batches(Counted(), config_with(8), 100, 3, rank=1, world_size=2, device=CPU)
    assert [positions(batch) for batch in batches] == [[104, 105, 106, 107], [112, 113, 114, 115], [120, 121, 122, 123]]


def test_training_samples_all_count() -> None:
    assert [b.weights_B for b in train_batches(Counted(), config_with(), 0, 2, 0, 1, CPU)] == [None, None]


def test_without_steps_there_is_no_batch_and_no_thread() -> None:
    source = Counted()
    assert list(train_batches(source, config_with(), 0, 0, 0, 1, CPU)) == []
    assert not source.reads


def test_as_many_batches_are_prefetched_as_configured() -> None:
    source = Counted()
    batches = train_batches(source, config_with(prefetch=3), 0, 100, 0, 1, CPU)
    with closing(cast("Any", batches)):
        next(batches)
        assert wait_until(lambda: len(source.reads) == 4), "the batch in use and three more"
        assert len(source.reads) == 4
        next(batches)
        assert wait_until(lambda: len(source.reads) == 5)


def test_batches_are_read_in_another_thread_than_the_training_thread() -> None:
    source = Counted()
    list(train_batches(source, config_with(), 0, 5, 0, 1, CPU))
    assert {thread.name for thread in source.threads} - {threading.current_thread().name} == {"trainer-data"}


def test_an_error_is_raised_in_place_of_its_batch() -> None:
    batches = train_batches(Counted(fails_at=24), config_with(8, prefetch=5), 0, 10, 0, 1, CPU)
    assert [positions(next(batches))[0] for _ in range(3)] == [0, 8, 16]
    with pytest.raises(UserError, match="sample 24 is bad"):
        next(batches)


def test_an_error_of_the_first_batch_is_raised_too() -> None:
    with pytest.raises(UserError, match="sample 0 is bad"):
        next(train_batches(Counted(fails_at=0), config_with(), 0, 10, 0, 1, CPU))


def test_after_an_error_there_are_no_more_batches() -> None:
    batches = train_batches(Counted(fails_at=8), config_with(8), 0, 10, 0, 1, CPU)
    next(batches)
    with pytest.raises(UserError):
        next(batches)
    assert list(batches) == []


def test_the_thread_ends_with_the_last_batch() -> None:
    assert len(list(train_batches(Counted(), config_with(), 0, 7, 0, 1, CPU))) == 7
    assert not loader_threads()


def test_closing_early_ends_the_thread() -> None:
    batches = train_batches(Counted(), config_with(), 0, 10**9, 0, 1, CPU)
    next(batches)
    assert len(loader_threads()) == 1
    cast("Any", batches).close()
    assert not loader_threads()


def test_dropping_the_iterator_ends_the_thread() -> None:
    batches = train_batches(Counted(), config_with(), 0, 10**9, 0, 1, CPU)
    next(batches)
    del batches
    gc.collect()
    assert not loader_threads()


def test_an_exception_of_the_training_loop_ends_the_thread() -> None:
    def loop() -> None:
        for _ in train_batches(Counted(), config_with(), 0, 10**9, 0, 1, CPU):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        loop()
    gc.collect()
    assert not loader_threads()


def test_closing_waits_for_the_current_read_and_starts_no_other() -> None:
    reading, resume, closing_now, begun = threading.Event(), threading.Event(), threading.Event(), []

    def items() -> Iterator[int]:
        for item in range(10):
            begun.append(item)
            if item == 1:
                reading.set()
                assert resume.wait(SECONDS)
            yield item

    def close() -> None:
        closing_now.set()
        cast("Any", batches).close()

    batches = prefetch(items(), 5, on_start=lambda: None)
    next(batches)
    assert reading.wait(SECONDS)
    closer = threading.Thread(target=close)
    closer.start()
    assert closing_now.wait(SECONDS)
    closer.join(0.2)
    assert closer.is_alive(), "the read has not finished"
    resume.set()
    closer.join(SECONDS)
    assert not closer.is_alive()
    assert begun == [0, 1]


def test_an_iterator_that_is_never_started_has_no_thread() -> None:
    source = Counted()
    batches = train_batches(source, config_with(), 0, 10, 0, 1, CPU)
    del batches
    assert not source.reads


def test_an_error_at_the_start_of_the_thread_is_raised() -> None:
    def fail() -> None:
        raise UserError("no such GPU")

    with pytest.raises(UserError, match="no such GPU"):
        next(prefetch(iter([1, 2]), 2, fail))


def test_a_batch_that_is_not_in_host_memory_needs_no_thread() -> None:
    # The meta device stands for a GPU, on which a source only queues its work.
    source = Counted(device=torch.device("meta"))
    assert len(list(train_batches(source, config_with(), 0, 4, 0, 1, CPU))) == 4
    assert source.threads == {threading.current_thread()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_host_batches_for_a_gpu_are_pinned() -> None:
    for batch in train_batches(Counted(), config_with(), 0, 3, 0, 1, torch.device("cuda", 0)):
        assert batch.dense_BD.is_pinned()
        assert batch.sparse.values().is_pinned()


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [1, 3, 7, 8, 9, 16, 50])
def test_every_sample_is_evaluated_once_and_ranks_have_equally_many_batches(num_samples: int, world_size: int) -> None:
    source, config = Counted(num_samples), config_with(8)
    ranks = [list(eval_batches(source, config, num_samples, r, world_size, CPU)) for r in range(world_size)]
    assert {len(batches) for batches in ranks} == {-(-num_samples // 8)}
    counted = [p for batches in ranks for b in batches for p, w in zip(positions(b), weights(b), strict=True) if w]
    assert sorted(counted) == list(range(num_samples))


def weights(batch: Batch) -> list[float]:
    assert batch.weights_B is not None
    return [float(weight) for weight in batch.weights_B]


def test_the_last_batch_is_padded_with_samples_of_weight_0() -> None:
    batches = list(eval_batches(Counted(50), config_with(8), 11, rank=0, world_size=1, device=CPU))
    assert positions(batches[1]) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert weights(batches[1]) == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_rank_beyond_the_samples_gets_a_full_batch_of_weight_0() -> None:
    batches = list(eval_batches(Counted(50), config_with(8), 9, rank=1, world_size=2, device=CPU))
    assert [weights(batch) for batch in batches] == [[1, 1, 1, 1], [0, 0, 0, 0]]
    assert max(positions(batches[1])) < 9, "no sample beyond the evaluation is read"


def test_full_batches_are_evaluated_with_weight_1_each() -> None:
    assert [weights(b) for b in eval_batches(Counted(), config_with(4), 8, 0, 1, CPU)] == [[1] * 4] * 2


def test_an_evaluation_has_its_own_batch_size() -> None:
    sizes = [len(positions(b)) for b in eval_batches(Counted(), config_with(8, eval_batch_size=4), 8, 0, 1, CPU)]
    assert sizes == [4, 4]


@pytest.mark.parametrize(("limit", "available", "expected"), [(10, None, 10), (10, 50, 10), (10, 7, 7), (0, 50, 50)])
def test_an_evaluation_ends_at_the_limit_or_with_the_samples(limit: int, available: int | None, expected: int) -> None:
    tree = config_with().model_dump()
    tree["data"] |= {"eval_samples": limit, "source": "somewhere:Else"}
    assert eval_size(Counted(available), TrainConfig.model_validate(tree)) == expected


def test_an_endless_evaluation_is_refused() -> None:
    config = config_of({"source": "somewhere:Else", "eval_samples": 0})
    with pytest.raises(UserError) as caught:
        eval_size(Counted(None), config)
    assert str(caught.value) == (
        "data.eval_samples is wrong for somewhere:Else, which has no end: got 0; allowed: 1 or more. "
        "Fix: --data.eval-samples N"
    )


def test_an_evaluation_is_the_same_every_time() -> None:
    config = config_with(64)
    source: Source = source_of(config, "eval")
    rounds = [[samples_of(b) for b in eval_batches(source, config, 100, 0, 1, CPU)] for _ in range(2)]
    assert rounds[0] == rounds[1]
