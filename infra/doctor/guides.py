"""The troubleshooting tables of the guides, written from the causes that the doctor knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra import clouds
from infra.doctor.causes import CLUSTER, GENERAL
from infra.doctor.model import Cause
from infra.doctor.tools import ROOT

#: `<!-- causes: NAME -->` ... `<!-- /causes -->` in a guide.
_BLOCK = re.compile(r"(<!-- causes: (?P<name>[\w-]+) -->\n).*?(<!-- /causes -->)", re.DOTALL)


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
    rows = (f"| {_cell(item.sign)} | {_cell(item.why)} | {_cell(item.general)} |" for item in causes)
    return "\n".join(["| you see | why | what to do |", "| --- | --- | --- |", *rows]) + "\n"


def files() -> Iterator[Path]:
    """The guides that have such a table."""
    for path in sorted(ROOT.glob("README.md")) + sorted((ROOT / "infra").rglob("README.md")):
        if "<!-- causes: " in path.read_text(encoding="utf-8"):
            yield path


def written(text: str, where: Path) -> str:
    """A guide's text with its tables as they should be; ValueError names a list that nobody has."""
    known = lists()

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in known:
            raise ValueError(f"{where}: no list of causes {name!r}; legal: {', '.join(known)}")
        return f"{match[1]}{table(known[name])}{match[3]}"

    return _BLOCK.sub(fill, text)


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
