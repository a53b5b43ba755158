"""What all processes decide together between two steps, without anyone waiting for it.

A signal reaches one process, a clock belongs to one process, yet all must save or stop after the same step. So every
step sends a few small numbers into an all-reduce of its own and reads the result of the one before, which finished
while the step ran: a decision is one step late and costs no wait.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_MEETING = timedelta(minutes=2)


@dataclass(frozen=True)
class Ballot:
    """True where any process said so, in the votes given after `step`."""

    step: int = -1
    stop: bool = False  # this process must go
    save_first: bool = False  # rank 0: the last save is too old to go without one
    due: bool = False  # rank 0: a save is due by the clock
    writing: bool = False  # this process has not finished the save under way


def new_gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """Collective: a gloo group of all processes whose collectives may take `timeout`.

    Meeting may take two minutes at most: a machine that is lost just then is noticed by nothing but this limit.
    """
    group = dist.new_group(backend="gloo", timeout=min(timeout, _MEETING))
    assert not isinstance(group, int), "every process is a member"
    dist.set_timeout(timeout, group)
    return group


class AsyncVote:
    """Collective: one per job, on a gloo group of its own, so that no other collective waits for it."""

    def __init__(self, timeout: timedelta) -> None:
        self._group = new_gloo_group(timeout)
        self._pending: tuple[Tensor, dist.Work] | None = None

    def submit(self, mine: Ballot) -> Ballot:
        """Give this process's votes after a step; what all said after the step before."""
        agreed = self._result()
        ballot = torch.tensor([int(v) for v in astuple(mine)], dtype=torch.int64)
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (ballot, work)
        return agreed

    def close(self) -> None:
        """Take in what is under way."""
        self._result()
        self._pending = None

    def _result(self) -> Ballot:
        if self._pending is None:
            return Ballot()
        ballot, work = self._pending
        work.wait()
        step, *rest = ballot.tolist()
        names = [field.name for field in fields(Ballot)][1:]
        return Ballot(step, **{name: bool(value) for name, value in zip(names, rest, strict=True)})
