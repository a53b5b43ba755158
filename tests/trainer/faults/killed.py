"""Runs killed repeatedly at seeded random moments, and checks of the samples that they trained on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from machines import Attempt, Machines, result_of

BATCH, STEPS, KILLS_PER_RUN = 48, 30, 8
CHANGES = {
    "train.steps": STEPS,
    "train.batch_size": BATCH,
    "metrics.log_every": 1,
    "metrics.train_metrics": False,
    "checkpoint.every_steps": 3,
    "checkpoint.every_minutes": 0,
}


@dataclass
class History:
    """The history of one run."""

    kills: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def resumes(self) -> int:
        """Number of starts that resumed from a checkpoint."""
        return sum(attempt.resumed_at() is not None for attempt in self.attempts)

    @property
    def trained(self) -> list[Attempt]:
        """Starts that began to train; the others were killed while they loaded a checkpoint."""
        return [a for a in self.attempts if any(e["event"] == "start" for e in a.events())]

    @property
    def steps_lost(self) -> list[int]:
        """Steps that each start after the first had to train again."""
        lost, reached = [], 0
        for attempt in self.trained:
            start = attempt.resumed_at() or 0
            lost.append(max(0, reached - start))
            reached = max([start, *(e["step"] for e in attempt.events() if e["event"] == "train")])
        return lost[1:]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step that led to the result, without steps that a later start trained again."""
        found: dict[int, float] = {}
        for attempt in self.trained:
            start = attempt.resumed_at() or 0
            found = {step: loss for step, loss in found.items() if step <= start}
            found |= {e["step"]: e["loss"] for e in attempt.events() if e["event"] == "train"}
        return found

    def misplaced_samples(self) -> int:
        """Return how many samples were trained twice or skipped; every step must train BATCH samples in order."""
        wrong = 0
        for attempt in self.attempts:
            for event in attempt.events():
                if event["event"] in ("train", "resume", "result"):
                    wrong += abs(event["position"] - BATCH * event["step"])
        steps = sorted(self.losses())
        return wrong + BATCH * len(set(range(1, STEPS + 1)) ^ set(steps))


def killed_runs(make: Callable[[], Machines], worlds: Sequence[int], kills: int, seed: int) -> list[History]:
    """Run, one after another with seeds from `seed`, as many runs as `kills` kills need."""
    histories: list[History] = []
    while (left := kills - sum(history.kills for history in histories)) > 0:
        histories.append(killed_run(make(), worlds, min(left, KILLS_PER_RUN), seed + len(histories)))
    return histories


def draw_fault(draw: random.Random, rank: int) -> dict[str, Any]:
    """Draw a kill -9 in a step, while files are written, before the marker, or while a checkpoint is read."""
    kinds = ["kill_in_step", "kill_in_save", "kill_in_load"] + (["kill_before_marker"] if rank == 0 else [])
    kind = draw.choice(kinds)
    if kind == "kill_in_step":
        return {"kind": kind, "step": draw.randint(1, 12), "delay": draw.choice([0.0, 0.001, 0.005])}
    if kind == "kill_in_save":
        return {"kind": kind, "write": draw.randint(1, 3000)}
    if kind == "kill_in_load":
        return {"kind": kind, "read": draw.randint(1, 200)}
    return {"kind": kind, "commit": draw.randint(1, 3)}


def killed_run(machines: Machines, worlds: Sequence[int], kills: int, seed: int) -> History:
    """Start a run until it completes, each time on the next of `worlds` processes, with `kills` processes killed.

    Every start gets a fault until that many processes have died. A fault may come too late for a start near its end.
    """
    draw, history, died = random.Random(seed), History(), 0
    machines.changes = CHANGES
    while not history.result:
        world = worlds[len(history.attempts) % len(worlds)]
        victim = draw.randrange(world)
        fault = draw_fault(draw, victim)
        attempt = machines.start(world, {victim: fault} if died < kills else {})
        codes = attempt.wait()
        history.attempts.append(attempt)
        died += codes.count(-9)
        if codes == [0] * world:
            history.result = result_of(attempt)
        else:
            assert -9 in codes, (
                f"no process was killed, but the exit codes are {codes}:\n{attempt.log.read_text()[-6000:]}"
            )
    history.kills = died
    return history
