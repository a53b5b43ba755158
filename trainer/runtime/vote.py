"""A vote of all processes between two steps, by asynchronous all-reduce.

A signal reaches one process and a clock belongs to one process, but all must save or stop after the same step. So each
step starts an all-reduce of a few small numbers and reads the result of the one before, which finished while the step
ran. A decision is one step late and costs no waiting.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_CONNECT_LIMIT = timedelta(minutes=2)


@dataclass(frozen=True)
class Ballot:
    """The votes of one process after `step`, or those of all: a field is true if any process voted for it."""

    step: int = -1
    stop: bool = False  # this process must stop
    save_first: bool = False  # rank 0: the last save is too old to stop without another one
    due: bool = False  # a save is due by the clock of rank 0, or by a spot notice
    writing: bool = False  # this process is still writing the pending save


def new_gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group of all processes with `timeout` for its collectives. Collective.

    Connecting is limited to two minutes, because nothing but this limit notices a machine that is lost meanwhile.
    """
    group = dist.new_group(backend="gloo", timeout=min(timeout, _CONNECT_LIMIT))
    assert not isinstance(group, int), "every process is a member"
    dist.set_timeout(timeout, group)
    return group


class AsyncVote:
    """Votes of all processes, on a separate gloo group so that they do not delay other collectives. Collective."""

    def __init__(self, timeout: timedelta) -> None:
        self._group = new_gloo_group(timeout)
        self._pending: tuple[Tensor, dist.Work] | None = None

    def submit(self, ballot: Ballot) -> Ballot:
        """Submit this process's votes after a step, and return all votes on the step before it."""
        result = self._wait()
        numbers = torch.tensor([int(v) for v in astuple(ballot)], dtype=torch.int64)
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (numbers, work)
        return result

    def close(self) -> None:
        """Wait for the pending all-reduce."""
        self._wait()
        self._pending = None

    def _wait(self) -> Ballot:
        """Return the result of the pending all-reduce, an empty ballot if there is none."""
        if self._pending is None:
            return Ballot()
        numbers, work = self._pending
        work.wait()
        step, *votes = numbers.tolist()
        names = [field.name for field in fields(Ballot)][1:]
        return Ballot(step, **{name: bool(vote) for name, vote in zip(names, votes, strict=True)})
