"""The parts of a stack's life that a user meets besides `up`: doctor, idle nodes, an upgrade, missing capacity."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import simulated_autoscaler
from engine_runs import Project, Run
from engine_world import World
from simulated_jobs import finish_jobs

#: The next minor version after the default one.
NEXT_VERSION = "1.36"
#: Minutes in which the autoscaler starts nodes for pending pods, and after which it has removed idle ones.
_START_MINUTES, _IDLE_MINUTES = 3, 13
#: Refuse every connection to another machine at once: there is no cloud to ask.
_NO_CLOUD = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
}

#: `python -m infra up --stack STACK --replace URN`, which finds its folder next to the code, in the project's folder.
_RECOVER = """
import sys
from pathlib import Path
from infra.automation import LiveStack
LiveStack(sys.argv[1], folder=Path.cwd()).up(replace=sys.argv[2:])
"""


@dataclass(frozen=True)
class Phase:
    """One run of the engine: what existed after it, and how long it took, simulated and real."""

    name: str
    num_resources: int
    minutes: float
    seconds: float


def run_doctor(project: Project) -> Run:
    """Run `python -m infra doctor` on a machine that reaches no cloud."""
    return project.command("python", "-m", "infra", "doctor", "--stack", project.stack, **_NO_CLOUD)


def wait_for_nodes(world: World) -> int:
    """Let the autoscaler start nodes for pending pods; return the number of GPU nodes."""
    world.clock.advance(_START_MINUTES)
    return num_gpu_nodes(world)


def end_run(world: World) -> int:
    """End the training run, let its nodes become idle, and return the number of GPU nodes that are left."""
    finish_jobs(world)
    world.clock.advance(_IDLE_MINUTES)
    return num_gpu_nodes(world)


def num_gpu_nodes(world: World) -> int:
    """Return the number of running GPU nodes."""
    return sum(simulated_autoscaler.size(pool) for pool in simulated_autoscaler.gpu_pools(world))


def recover(project: Project, failed: Run) -> Run:
    """Do what the command that a failed run printed does, without its question."""
    found = re.findall(r"python -m infra up --stack \S+((?: --replace '[^']+')*)", failed.output)
    assert found, f"the failed run names no command: {failed.output}"
    return project.command("python", "-c", _RECOVER, project.stack, *re.findall(r"'([^']+)'", found[-1]))


def table(phases: Mapping[str, Sequence[Phase]]) -> list[str]:
    """Return the lines that the tests print at their end: resources and simulated minutes of each stack's phases."""
    row: Callable[..., str] = "{:<10} {:<16} {:>9} {:>17} {:>8}".format
    lines = [row("stack", "phase", "resources", "simulated minutes", "seconds")]
    for stack, own in phases.items():
        lines += [row(stack, one.name, one.num_resources, f"{one.minutes:.1f}", f"{one.seconds:.0f}") for one in own]
    return lines
