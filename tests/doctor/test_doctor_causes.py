"""The lists of causes, which both the checks and the guides use."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from infra.doctor import guides
from infra.doctor.guides import lists
from infra.findings.model import Cause

ROOT = Path(__file__).resolve().parents[2]
CAUSES = [cause for causes in lists().values() for cause in causes]
#: Causes that no check can find in advance; only the guides mention them.
GUIDES_ONLY = {
    "aws-capacity",
    "aws-creator",
    "aws-drain",
    "aws-efa",
    "aws-failed-group",
    "aws-log-group",
    "azure-busy",
    "azure-capacity",
    "azure-drain",
    "azure-forbidden",
    "azure-nodes-blocked",
    "azure-private",
    "azure-push",
    "gcp-capacity",
    "gcp-driver",
    "gcp-maintenance",
    "gcp-key-grant",
    "image-immutable",
    "image-push",
}
PATTERNS = ("doctor/*.py", "findings/*.py", "clouds/*/doctor.py", "clouds/*/doctor/*.py")
CHECKS = "\n".join(
    path.read_text()
    for pattern in PATTERNS
    for path in (ROOT / "infra").glob(pattern)
    if not path.name.endswith("causes.py")
)
#: The name of each cause's constant by its key.
CONSTANTS = {
    key: name
    for path in (ROOT / "infra").rglob("*.py")
    for name, key in re.findall(r'^(\w+) = Cause\(\s*"([\w-]+)"', path.read_text(), re.MULTILINE)
}


def test_every_cause_has_a_unique_key() -> None:
    keys = [cause.key for cause in CAUSES]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.key)
def test_a_check_finds_every_cause_that_can_be_found_in_advance(cause: Cause) -> None:
    call = rf"\b(?:problem|unknown|QueryFailedError)\(\s*(?:causes\.)?{CONSTANTS[cause.key]}\b"
    uses = re.findall(rf"{call}|\badvertised\(.*\b{CONSTANTS[cause.key]}\b", CHECKS)
    if cause.key in GUIDES_ONLY:
        assert not uses, "a check finds it: remove it from GUIDES_ONLY"
    else:
        assert uses, "no check finds it"


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.key)
def test_a_cause_has_a_symptom_a_reason_and_a_fix(cause: Cause) -> None:
    assert cause.symptom
    assert cause.reason
    assert cause.fix
    for text in (cause.symptom, cause.reason):
        assert not any(name for _, name, _, _ in string.Formatter().parse(text)), "only a fix has placeholders"
    placeholders = set(re.findall(r"<\w+>", cause.generic_fix))
    assert not {"<fix>", "<login>", "<install>"} & placeholders, "a guide must show the whole fix"
    assert "<" not in cause.symptom, "Markdown would drop a placeholder inside code"


@pytest.mark.parametrize("path", sorted(guides.files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tables_of_a_guide_are_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert guides.update_tables(text, path) == text, "run: python -m infra doctor --markdown"


def test_every_list_of_causes_is_in_a_guide() -> None:
    shown = {name for path in guides.files() for name in re.findall(r"<!-- causes: ([\w-]+) -->", path.read_text())}
    assert shown == set(lists())


def test_a_stale_table_is_replaced_and_an_unknown_list_is_an_error(tmp_path: Path) -> None:
    text = "before\n<!-- causes: cluster -->\nold\n<!-- /causes -->\nafter\n"
    updated = guides.update_tables(text, tmp_path)
    assert updated.startswith("before\n<!-- causes: cluster -->\n| you see | why | what to do |\n")
    assert updated.endswith("<!-- /causes -->\nafter\n")
    assert "old" not in updated
    with pytest.raises(ValueError, match="no list of causes: got 'nope'"):
        guides.update_tables(text.replace("cluster", "nope"), tmp_path)
