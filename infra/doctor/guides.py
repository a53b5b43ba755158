"""Generated tables of the guides: causes from the doctor, costs from the catalog, and alerts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra import clouds, stack_files
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
    """Return every list of causes by the name that a guide uses for it."""
    found: dict[str, Sequence[Cause]] = {"general": GENERAL, "cluster": CLUSTER}
    for name in clouds.available():
        doctor = clouds.load(name).doctor
        if doctor:
            found[name] = doctor.CAUSES
    return found


def table(causes: Sequence[Cause]) -> str:
    """Return a Markdown table of symptoms, reasons and fixes."""
    rows = (f"| {_cell(item.symptom)} | {_cell(item.reason)} | {_cell(item.generic_fix)} |" for item in causes)
    return "\n".join(["| you see | why | what to do |", "| --- | --- | --- |", *rows]) + "\n"


def hourly(stack: str) -> str:
    """Return a Markdown table of the hourly cost of one of this repository's stacks, item by item."""
    settings = stack_files.read(stack).parse_leniently().settings
    lines = settings.cost_lines(settings.gpu.nodes.desired)
    rows = [f"| {line.count:g} x {line.what} | {line.count * line.on_demand_usd_per_hour:.2f} |" for line in lines]
    total = HourlyCost(lines).on_demand_usd
    return "\n".join(["| item | USD per hour |", "| --- | ---: |", *rows, f"| **all** | **{total:.2f}** |"]) + "\n"


def hourly_of_all() -> str:
    """Return a Markdown table of the hourly cost of every stack that pays for its nodes."""
    rows = []
    for stack in stack_files.list_stacks():
        settings = stack_files.read(stack).parse_leniently().settings
        lines = settings.cost_lines(settings.gpu.nodes.desired)
        if lines:
            pool, total = lines[0], HourlyCost(lines).on_demand_usd
            guide = f"[{stack}](infra/clouds/{settings.cloud}/README.md#what-an-hour-costs)"
            nodes = pool.count * pool.on_demand_usd_per_hour
            rows.append(f"| {guide}: {pool.count:g} x {pool.what} | {total:.2f} | {nodes:.2f} |")
    head = ["| stack | USD per hour | of which GPU nodes |", "| --- | ---: | ---: |"]
    return "\n".join([*head, *rows]) + "\n"


def files() -> Iterator[Path]:
    """Yield the guides that contain a generated table."""
    for path in sorted(ROOT.glob("README.md")) + sorted((ROOT / "infra").rglob("README.md")):
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text) or _ALERTS.search(text):
            yield path


def update_tables(text: str, path: Path) -> str:
    """Return a guide's text with current tables; raise ValueError for an unknown table."""
    known = lists()

    def fill(match: re.Match[str]) -> str:
        """Return one block with its current table."""
        name = match["name"]
        allowed = list(known) if match["kind"] == "causes" else [*stack_files.list_stacks(), "all"]
        if name not in allowed:
            raise ValueError(f"{path}: no list of {match['kind']}: got {name!r}; allowed: {', '.join(allowed)}")
        costs = hourly_of_all() if name == "all" else hourly(name) if match["kind"] == "cost" else ""
        return f"{match[1]}{costs or table(known[name])}{match[4]}"

    return _ALERTS.sub(lambda match: f"{match[1]}{alerts()}{match[2]}", _BLOCK.sub(fill, text))


def alerts() -> str:
    """Return a Markdown table of the alerts."""
    rows = []
    for item in ALERTS:
        when = f"{_cell(_LABEL.sub('...', item.summary))}" + (f", for {item.minutes} min" if item.minutes else "")
        rows.append(f"| `{item.name}` | {item.severity} | {when} | {_cell(item.action)} |")
    return "\n".join(["| alert | | when | what to do |", "| --- | --- | --- | --- |", *rows]) + "\n"


def rewrite() -> list[Path]:
    """Update the tables of every guide and return the changed files."""
    changed = []
    for path in files():
        before = path.read_text(encoding="utf-8")
        after = update_tables(before, path)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path.relative_to(ROOT))
    return changed


def _cell(text: str) -> str:
    """Escape a text for a table's cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
