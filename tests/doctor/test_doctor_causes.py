"""The one list of causes: every check draws from it, and so do the guides."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from infra.doctor import guides
from infra.doctor.guides import lists
from infra.findings.model import Cause

ROOT = Path(__file__).resolve().parents[2]
EVERY = [cause for causes in lists().values() for cause in causes]
#: Causes that no question can find beforehand, and which only the guides tell.
TOLD_ONLY = {"aws-capacity", "aws-efa", "azure-capacity", "azure-private", "gcp-capacity"}
#: Blanks that two checks fill in the same way for all causes of their kind.
SOURCES = [
    path
    for pattern in ("*.py", "doctor/*.py", "findings/*.py", "clouds/*/doctor.py", "clouds/*/doctor/*.py")
    for path in (ROOT / "infra").glob(pattern)
]


def test_every_cause_has_a_key_of_its_own() -> None:
    keys = [cause.key for cause in EVERY]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", sorted(lists()))
def test_every_cause_that_is_not_only_told_is_used_by_a_check(name: str) -> None:
    code = "\n".join(path.read_text() for path in SOURCES if not path.name.endswith("causes.py"))
    module = "infra.findings.common_causes" if name in ("general", "cluster") else f"infra.clouds.{name}.doctor.causes"
    if name == "local":
        module = "infra.clouds.local.doctor"
    names = {
        value.key: key for key, value in vars(__import__(module, fromlist=["x"])).items() if isinstance(value, Cause)
    }
    for cause in lists()[name]:
        uses = len(
            re.findall(
                rf"\b(?:problem|unknown|QueryFailedError|advertised)\([^#]{{0,200}}?\b{names[cause.key]}\b", code
            )
        )
        if cause.key in TOLD_ONLY:
            assert uses == 0, f"{cause.key} is found by a check: take it off the list"
        else:
            assert uses, f"no check finds {cause.key}"


@pytest.mark.parametrize("cause", EVERY, ids=lambda cause: cause.key)
def test_a_cause_says_what_is_seen_why_and_what_to_do(cause: Cause) -> None:
    assert cause.symptom
    assert cause.reason
    assert cause.fix
    for text in (cause.symptom, cause.reason):
        assert not any(name for _, name, _, _ in string.Formatter().parse(text)), "only a cure has blanks"
    assert not {"<fix>", "<login>", "<install>"} & set(re.findall(r"<\w+>", cause.generic_fix)), "a guide must say what"
    assert "<" not in cause.symptom, "a blank inside code would not show in a guide"


@pytest.mark.parametrize("path", sorted(guides.files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tables_of_a_guide_are_those_of_the_list(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert guides.written(text, path) == text, "run: python -m infra doctor --markdown"


def test_every_list_stands_in_a_guide() -> None:
    shown = {name for path in guides.files() for name in re.findall(r"<!-- causes: ([\w-]+) -->", path.read_text())}
    assert shown == set(lists())


def test_a_table_that_has_drifted_is_written_anew_and_one_of_an_unknown_list_refused(tmp_path: Path) -> None:
    text = "before\n<!-- causes: cluster -->\nold\n<!-- /causes -->\nafter\n"
    fixed = guides.written(text, tmp_path)
    assert fixed.startswith("before\n<!-- causes: cluster -->\n| you see | why | what to do |\n")
    assert fixed.endswith("<!-- /causes -->\nafter\n")
    assert "old" not in fixed
    with pytest.raises(ValueError, match="no list of causes 'nope'"):
        guides.written(text.replace("cluster", "nope"), tmp_path)
