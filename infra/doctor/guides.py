"""The tables of the guides that are data: causes from the doctor's list, costs from the catalog."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra import clouds
from infra import stack_files as configuration
from infra.cost import HourlyCost
from infra.doctor.tools import ROOT
from infra.findings.common_causes import CLUSTER, GENERAL
from infra.findings.model import Cause
from infra.monitoring.alerts import ALERTS

#: `<!-- causes: NAME -->` ... `<!-- /causes -->` in a guide, and the same with `cost`.
_BLOCK = re.compile(r"(<!-- (?P<kind>causes|cost): (?P<name>[\w-]+) -->\n).*?(<!-- /(?P=kind) -->)", re.DOTALL)
_ALERTS = re.compile(r"(<!-- alerts -->\n).*?(<!-- /alerts -->)", re.DOTALL)
_LABEL = re.compile(r"\{\{.*?\}\}")


def lists() -> dict[str, Sequence[Cause]]:
    """Every list of causes by the name that a guide asks for."""
    found: dict[str, Sequence[Cause]] = {"general": GENERAL, "cluster": CLUSTER}
    for name in clouds.available():
        doctor = clouds.load(name).doctor
        if doctor:
            found[name] = doctor.CAUSES
    return found


def table(causes: Sequence[Cause]) -> str:
    """Rows of Markdown: what one sees, why, what to do."""
    rows = (f"| {_cell(item.symptom)} | {_cell(item.reason)} | {_cell(item.generic_fix)} |" for item in causes)
    return "\n".join(["| you see | why | what to do |", "| --- | --- | --- |", *rows]) + "\n"


def hourly(stack: str) -> str:
    """What an hour of a stack of this repository costs, item by item, as its file of settings stands."""
    settings = configuration.read(stack).parse_leniently().settings
    lines = settings.cost_lines(settings.gpu.nodes.desired)
    rows = [f"| {line.count:g} x {line.what} | {line.count * line.on_demand_usd_per_hour:.2f} |" for line in lines]
    total = HourlyCost(lines).on_demand_usd
    return "\n".join(["| item | USD per hour |", "| --- | ---: |", *rows, f"| **all** | **{total:.2f}** |"]) + "\n"


def hourly_of_all() -> str:
    """What an hour of every stack costs that pays for its nodes, and how much of it is the GPU nodes."""
    rows = []
    for stack in configuration.list_stacks():
        settings = configuration.read(stack).parse_leniently().settings
        lines = settings.cost_lines(settings.gpu.nodes.desired)
        if lines:
            pool, total = lines[0], HourlyCost(lines).on_demand_usd
            guide = f"[{stack}](infra/clouds/{settings.cloud}/README.md#what-an-hour-costs)"
            nodes = pool.count * pool.on_demand_usd_per_hour
            rows.append(f"| {guide}: {pool.count:g} x {pool.what} | {total:.2f} | {nodes:.2f} |")
    head = ["| stack | USD per hour | of which GPU nodes |", "| --- | ---: | ---: |"]
    return "\n".join([*head, *rows]) + "\n"


def files() -> Iterator[Path]:
    """The guides that have such a table."""
    for path in sorted(ROOT.glob("README.md")) + sorted((ROOT / "infra").rglob("README.md")):
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text) or _ALERTS.search(text):
            yield path


def written(text: str, where: Path) -> str:
    """A guide's text with its tables as they should be; ValueError names a list that nobody has."""
    known = lists()

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        legal = list(known) if match["kind"] == "causes" else [*configuration.list_stacks(), "all"]
        if name not in legal:
            raise ValueError(f"{where}: no list of {match['kind']} {name!r}; legal: {', '.join(legal)}")
        costs = hourly_of_all() if name == "all" else hourly(name) if match["kind"] == "cost" else ""
        return f"{match[1]}{costs or table(known[name])}{match[4]}"

    return _ALERTS.sub(lambda match: f"{match[1]}{alerts()}{match[2]}", _BLOCK.sub(fill, text))


def alerts() -> str:
    """The alerts as a table."""
    rows = []
    for item in ALERTS:
        when = f"{_cell(_LABEL.sub('...', item.summary))}" + (f", for {item.minutes} min" if item.minutes else "")
        rows.append(f"| `{item.name}` | {item.severity} | {when} | {_cell(item.action)} |")
    return "\n".join(["| alert | | when | what to do |", "| --- | --- | --- | --- |", *rows]) + "\n"


def rewrite() -> list[Path]:
    """Bring every guide up to date; the files that changed."""
    changed = []
    for path in files():
        before = path.read_text(encoding="utf-8")
        after = written(before, path)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path.relative_to(ROOT))
    return changed


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
