"""Draws the dashboard's training panels from a real run: `python tests/monitoring/picture.py OUT.png`.

The run has two CPU processes, one of which is killed, so that both restart and resume. The script scrapes the metrics
endpoint twice a second and evaluates each panel's PromQL, which Grafana evaluates on a cluster.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import promql_parser
from monitoring_queries import parse

from infra.monitoring.board import TRAINING, Panel

ROOT = Path(__file__).resolve().parents[2]
_PORT, _SCRAPE_SECONDS = 9410, 0.5
_OPTIONS = {
    "train.run": "dashboard",
    "train.steps": "1500",
    "train.batch-size": "1024",
    "train.eval-every": "250",
    "model.num-embeddings": "20000",
    "model.embedding-dim": "16",
    "model.dense-arch": "[64,16]",
    "model.over-arch": "[64,1]",
    "data.train-samples": "4000000",
    "data.eval-samples": "16384",
    "checkpoint.every-steps": "250",
    "metrics.log-every": "20",
    "metrics.progress": "none",
    "metrics.prometheus-port": str(_PORT),
}
_KILL_AT_STEP = 650
Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


class Scrapes:
    """The series of the metrics endpoint over time."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[tuple[str, Labels], float]]] = []

    def scrape(self) -> None:
        """Record the current series, nothing if the endpoint does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics", timeout=2) as page:
                text = page.read().decode()
        except OSError:
            return
        found = {}
        for name, labels, value in re.findall(r"^(trainer_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            key = frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
            found[name, key] = float(value)
        self.samples.append((time.time(), found))

    def latest(self, name: str) -> float | None:
        """Return the newest value of a series, None without one."""
        values = [value for key, value in self.samples[-1][1].items() if key[0] == name] if self.samples else []
        return values[0] if values else None


def run(scrapes: Scrapes, folder: Path) -> None:
    """Train to the end, and kill one worker on the way so that torchrun restarts the processes."""
    options = _OPTIONS | {"checkpoint.uri": str(folder)}
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", "2", "--max-restarts", "1", "train"]
    command += [word for key, value in options.items() for word in (f"--{key}", value)]
    process = subprocess.Popen(command, cwd=ROOT)
    killed = False
    while process.poll() is None:
        time.sleep(_SCRAPE_SECONDS)
        scrapes.scrape()
        if not killed and (scrapes.latest("trainer_step") or 0) >= _KILL_AT_STEP:
            killed = True
            os.kill(child_processes(process.pid)[-1], signal.SIGKILL)
    assert killed, "the run ended before its worker was killed"
    assert process.returncode == 0, f"the run failed with {process.returncode}"


def child_processes(pid: int) -> list[int]:
    """Return the ids of a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def evaluate(tree: Any, scrape: tuple[float, Mapping[tuple[str, Labels], float]], history: Scrapes) -> Vector | float:
    """Evaluate the part of PromQL that the panels use: selectors, sum by, time(), increase, minus."""
    when, series = scrape
    if isinstance(tree, promql_parser.ParenExpr):
        return evaluate(tree.expr, scrape, history)
    if isinstance(tree, promql_parser.VectorSelector):
        matchers = [(matcher.name, matcher.value) for matcher in tree.matchers.matchers]
        return {
            labels: value
            for (name, labels), value in series.items()
            if name == tree.name and all(re.fullmatch(value, dict(labels).get(label, "")) for label, value in matchers)
        }
    if isinstance(tree, promql_parser.Call) and tree.func.name == "time":
        return when
    if isinstance(tree, promql_parser.Call) and tree.func.name == "increase":
        selector = tree.args[0].vector_selector
        first = evaluate(selector, history.samples[0], history)
        last = evaluate(selector, scrape, history)
        assert isinstance(first, dict)
        assert isinstance(last, dict)
        return {labels: max(0.0, value - first.get(labels, 0.0)) for labels, value in last.items()}
    if isinstance(tree, promql_parser.AggregateExpr):
        vector = evaluate(tree.expr, scrape, history)
        assert isinstance(vector, dict)
        sums: Vector = {}
        for labels, value in vector.items():
            group = frozenset(item for item in labels if item[0] in tree.modifier.labels)
            sums[group] = sums.get(group, 0.0) + value
        return sums
    if isinstance(tree, promql_parser.BinaryExpr) and str(tree.op) == "-":
        left, right = evaluate(tree.lhs, scrape, history), evaluate(tree.rhs, scrape, history)
        assert isinstance(left, float)
        assert isinstance(right, dict)
        return {labels: left - value for labels, value in right.items()}
    raise AssertionError(f"this script cannot evaluate: {tree}")


def draw(axes: Any, panel: Panel, scrapes: Scrapes) -> None:
    """Draw one panel."""
    start = scrapes.samples[0][0]
    for legend, query in panel.queries.items():
        if "trainer_" not in query:  # series of kube-state-metrics exist only on a cluster
            continue
        lines: dict[Labels, list[tuple[float, float]]] = {}
        for scrape in scrapes.samples:
            found = evaluate(parse(query), scrape, scrapes)
            assert isinstance(found, dict)
            for labels, value in found.items():
                points = lines.setdefault(labels, [])
                if points and scrape[0] - start - points[-1][0] > 4 * _SCRAPE_SECONDS:
                    points.append((points[-1][0], float("nan")))  # a gap in the line
                points.append((scrape[0] - start, value))
        for labels, points in lines.items():
            name = re.sub(r"\{\{(\w+)\}\}", lambda match, found=labels: dict(found).get(match[1], ""), legend)
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axes.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False)


def main() -> int:
    """Run the training and draw the panels."""
    target = Path(sys.argv[1])
    mpl.use("Agg")
    from matplotlib import pyplot

    scrapes = Scrapes()
    with tempfile.TemporaryDirectory() as folder:
        run(scrapes, Path(folder))
    figure, grid = pyplot.subplots(3, 3, figsize=(13, 8.2), layout="constrained")
    for axes, panel in zip(grid.flat, TRAINING, strict=True):
        draw(axes, panel, scrapes)
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=8)
    figure.suptitle("TorchRec training: a local run with one killed worker (drawn by matplotlib)", fontsize=11)
    figure.savefig(target, dpi=85)
    sys.stdout.write(f"{target}: {len(scrapes.samples)} scrapes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
