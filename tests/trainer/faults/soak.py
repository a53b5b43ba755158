"""`make soak`: a hundred kills of runs of one to four processes, and a table of the steps that they lost.

Arguments: the number of kills (100) and the first seed (1). Exit code 1 if a sample was repeated or skipped, or a loss
differs from that of an undisturbed run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fork_server import forked_processes
from killed import CHANGES, KILLS_PER_RUN, History, killed_run
from machines import Machines, result_of
from rich.console import Console
from rich.table import Table

WORLDS: dict[str, list[int]] = {"1": [1], "2": [2], "3": [3], "4": [4], "mixed": [2, 1, 4, 3]}
CLOSE = 2e-3  # another number of processes sums in another order


def main() -> int:
    """Run all kinds of runs in turn until all kills have happened; return the exit code."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    console = Console(stderr=True)
    histories_by_world: dict[str, list[History]] = {name: [] for name in WORLDS}
    expected: dict[int, float] = {}
    with forked_processes(), tempfile.TemporaryDirectory() as scratch:

        def machines() -> Machines:
            return Machines(Path(tempfile.mkdtemp(dir=scratch)), CHANGES)

        for world in (1, 2, 3, 4):
            undisturbed = machines().start(world)
            assert undisturbed.wait() == [0] * world
            expected[world] = result_of(undisturbed)["loss"]
        done, names = 0, list(WORLDS)
        while done < kills:
            name = names[sum(map(len, histories_by_world.values())) % len(names)]
            history = killed_run(machines(), WORLDS[name], min(KILLS_PER_RUN, kills - done), seed)
            seed += 1
            done += history.kills
            histories_by_world[name].append(history)
            console.print(f"{done} of {kills} kills; {name} processes, {len(history.attempts)} starts", highlight=False)
        table, good = build_table(histories_by_world, expected)
    Console().print(table)
    return 0 if good else 1


def build_table(histories_by_world: dict[str, list[History]], expected: dict[int, float]) -> tuple[Table, bool]:
    """Return a table with one row per kind of run, and whether every run is correct."""
    table, good = Table(title="kill -9 of a random process at a random moment"), True
    for column in ("processes", "runs", "kills", "resumes", "steps lost at most", "samples repeated or skipped"):
        table.add_column(column, justify="right")
    table.add_column("final loss")
    for name, histories in histories_by_world.items():
        wrong = sum(history.misplaced_samples() for history in histories)
        losses = {history.result["loss"] for history in histories}
        target_loss = expected[WORLDS[name][-1]]
        exact = losses <= {target_loss}
        close = all(abs(loss - target_loss) < CLOSE for loss in losses)
        good &= wrong == 0 and (exact if name != "mixed" else close)
        verdict = "equal" if exact else f"within {max(abs(loss - target_loss) for loss in losses):.1e}"
        counts = (len(histories), sum(s.kills for s in histories), sum(s.resumes for s in histories))
        lost = max((step for s in histories for step in s.steps_lost), default=0)
        table.add_row(name, *map(str, counts), str(lost), str(wrong), verdict)
    return table, good


if __name__ == "__main__":
    sys.exit(main())
