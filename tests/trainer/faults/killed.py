"""Runs that are killed again and again at moments drawn from a seed, and what became of their samples."""

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
class Story:
    """What happened to one run."""

    kills: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def resumes(self) -> int:
        """Starts that went on from a checkpoint."""
        return sum(attempt.resumed_at() is not None for attempt in self.attempts)

    @property
    def trained(self) -> list[Attempt]:
        """Starts that lived to their first step; those that died while they loaded have done nothing."""
        return [a for a in self.attempts if any(e["event"] == "start" for e in a.events())]

    @property
    def steps_lost(self) -> list[int]:
        """Per start but the first: steps that were trained before it and had to be trained again."""
        lost, reached = [], 0
        for attempt in self.trained:
            start = attempt.resumed_at() or 0
            lost.append(max(0, reached - start))
            reached = max([start, *(e["step"] for e in attempt.events() if e["event"] == "train")])
        return lost[1:]

    def losses(self) -> dict[int, float]:
        """Step -> loss along the line that led to the end: of each start what no later start went back before."""
        found: dict[int, float] = {}
        for attempt in self.trained:
            start = attempt.resumed_at() or 0
            found = {step: loss for step, loss in found.items() if step <= start}
            found |= {e["step"]: e["loss"] for e in attempt.events() if e["event"] == "train"}
        return found

    def misplaced_samples(self) -> int:
        """Samples that this line trained twice or not at all: it must be BATCH samples for every step, in order."""
        wrong = 0
        for attempt in self.attempts:
            for event in attempt.events():
                if event["event"] in ("train", "resume", "result"):
                    wrong += abs(event["position"] - BATCH * event["step"])
        steps = sorted(self.losses())
        return wrong + BATCH * len(set(range(1, STEPS + 1)) ^ set(steps))


def killed_runs(make: Callable[[], Machines], worlds: Sequence[int], kills: int, seed: int) -> list[Story]:
    """As many runs, one after another with seeds from `seed` on, as `kills` kills take."""
    stories: list[Story] = []
    while (left := kills - sum(story.kills for story in stories)) > 0:
        stories.append(killed_run(make(), worlds, min(left, KILLS_PER_RUN), seed + len(stories)))
    return stories


def draw_fault(draw: random.Random, rank: int) -> dict[str, Any]:
    """A kill -9 in a step, while files are written, between files and marker, or while a checkpoint is read."""
    kinds = ["kill_in_step", "kill_in_save", "kill_in_load"] + (["kill_before_marker"] if rank == 0 else [])
    kind = draw.choice(kinds)
    if kind == "kill_in_step":
        return {"kind": kind, "step": draw.randint(1, 12), "delay": draw.choice([0.0, 0.001, 0.005])}
    if kind == "kill_in_save":
        return {"kind": kind, "write": draw.randint(1, 3000)}
    if kind == "kill_in_load":
        return {"kind": kind, "read": draw.randint(1, 200)}
    return {"kind": kind, "commit": draw.randint(1, 3)}


def killed_run(machines: Machines, worlds: Sequence[int], kills: int, seed: int) -> Story:
    """Start the run until it has finished, each time on the next of `worlds` processes, with a fault in every start
    until `kills` processes have died of kill -9. (A moment may come too late for a start that is nearly through.)"""
    draw, story, died = random.Random(seed), Story(), 0
    machines.changes = CHANGES
    while not story.result:
        world = worlds[len(story.attempts) % len(worlds)]
        victim = draw.randrange(world)
        fault = draw_fault(draw, victim)
        attempt = machines.start(world, {victim: fault} if died < kills else {})
        codes = attempt.wait()
        story.attempts.append(attempt)
        died += codes.count(-9)
        if codes == [0] * world:
            story.result = result_of(attempt)
        else:
            assert -9 in codes, f"nobody was killed, yet {codes}:\n{attempt.log.read_text()[-6000:]}"
    story.kills = died
    return story
