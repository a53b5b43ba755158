"""Draws the dashboard's training panels from the endpoint of a real run: `python tests/monitoring/picture.py OUT.png`.

Grafana draws the same queries on a cluster. Here a run of two CPU processes is killed once and resumed, its endpoint is
asked twice a second, and each panel's PromQL is evaluated on what came back, as far as those panels use the language.
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
from monitoring_queries import parsed

from infra.monitoring.board import TRAINING, Panel

ROOT = Path(__file__).resolve().parents[2]
_PORT, _EVERY_SECONDS = 9410, 0.5
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
    """What the endpoint said, by time."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, dict[tuple[str, Labels], float]]] = []

    def ask(self) -> None:
        """One scrape; none while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics", timeout=2) as page:
                text = page.read().decode()
        except OSError:
            return
        found = {}
        for name, labels, value in re.findall(r"^(trainer_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            key = frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
            found[name, key] = float(value)
        self.seen.append((time.time(), found))

    def latest(self, name: str) -> float | None:
        """The newest value of a series of one label."""
        values = [value for key, value in self.seen[-1][1].items() if key[0] == name] if self.seen else []
        return values[0] if values else None


def run(scrapes: Scrapes, folder: Path) -> None:
    """Train, kill, resume, to the end."""
    options = _OPTIONS | {"checkpoint.uri": str(folder)}
    words = [sys.executable, "-m", "trainer", "launch", "--nproc", "2", "train"]
    words += [word for key, value in options.items() for word in (f"--{key}", value)]
    killed = False
    while True:
        process = subprocess.Popen(words, cwd=ROOT, process_group=0)
        while process.poll() is None:
            time.sleep(_EVERY_SECONDS)
            scrapes.ask()
            if not killed and (scrapes.latest("trainer_step") or 0) >= _KILL_AT_STEP:
                killed = True
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return
        assert killed, f"the run ended with {process.returncode}"


def evaluated(tree: Any, scrape: tuple[float, Mapping[tuple[str, Labels], float]], history: Scrapes) -> Vector | float:
    """The part of PromQL that the panels use: selectors, sum by, time(), increase, minus."""
    when, series = scrape
    if isinstance(tree, promql_parser.ParenExpr):
        return evaluated(tree.expr, scrape, history)
    if isinstance(tree, promql_parser.VectorSelector):
        wanted = [(m.name, m.value) for m in tree.matchers.matchers]
        return {
            labels: value
            for (name, labels), value in series.items()
            if name == tree.name and all(re.fullmatch(v, dict(labels).get(k, "")) for k, v in wanted)
        }
    if isinstance(tree, promql_parser.Call) and tree.func.name == "time":
        return when
    if isinstance(tree, promql_parser.Call) and tree.func.name == "increase":
        selector = tree.args[0].vector_selector
        first = evaluated(selector, history.seen[0], history)
        last = evaluated(selector, scrape, history)
        assert isinstance(first, dict)
        assert isinstance(last, dict)
        return {labels: max(0.0, value - first.get(labels, 0.0)) for labels, value in last.items()}
    if isinstance(tree, promql_parser.AggregateExpr):
        inner = evaluated(tree.expr, scrape, history)
        assert isinstance(inner, dict)
        sums: Vector = {}
        for labels, value in inner.items():
            kept = frozenset(item for item in labels if item[0] in tree.modifier.labels)
            sums[kept] = sums.get(kept, 0.0) + value
        return sums
    if isinstance(tree, promql_parser.BinaryExpr) and str(tree.op) == "-":
        left, right = evaluated(tree.lhs, scrape, history), evaluated(tree.rhs, scrape, history)
        assert isinstance(left, float)
        assert isinstance(right, dict)
        return {labels: left - value for labels, value in right.items()}
    raise AssertionError(f"a panel uses more of PromQL than this script knows: {tree}")


def draw(axes: Any, panel: Panel, scrapes: Scrapes) -> None:
    """One panel."""
    start = scrapes.seen[0][0]
    for legend, query in panel.queries.items():
        if "trainer_" not in query:  # kube-state-metrics: there is no cluster here
            continue
        lines: dict[Labels, list[tuple[float, float]]] = {}
        before = start
        for scrape in scrapes.seen:
            found = evaluated(parsed(query), scrape, scrapes)
            assert isinstance(found, dict)
            for labels, value in found.items():
                points = lines.setdefault(labels, [])
                if points and scrape[0] - before > 4 * _EVERY_SECONDS:
                    points.append((before - start, float("nan")))
                points.append((scrape[0] - start, value))
            before = scrape[0]
        for labels, points in lines.items():
            name = re.sub(r"\{\{(\w+)\}\}", lambda match, found=labels: dict(found).get(match[1], ""), legend)
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axes.set_title(panel.title, fontsize=10, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False)


def main() -> int:
    """Run, then draw."""
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
    figure.suptitle("TorchRec training: a local run, killed once and resumed (drawn by matplotlib)", fontsize=11)
    figure.savefig(target, dpi=85)
    sys.stdout.write(f"{target}: {len(scrapes.seen)} scrapes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
