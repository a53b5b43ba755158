"""Check that everything a reader sees is plain English: `python tests/plain_english.py` prints each banned word.

The list holds words of a private dialect that the first versions were written in. Each has a plain replacement. A word
that is right in one sentence goes into EXCEPTIONS with the phrase that it is right in.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".svg", ""}
#: This file holds the words themselves. Golden manifests and Go modules are data.
NOT_READ = re.compile(r"^tests/plain_english\.py$|(^|/)golden/|(^|/)go/|(^|/)LICENSE$|requirements.*\.txt$")

#: A regular expression for the word or phrase, and what to write instead. `_` ends a word: names are checked too.
REPLACEMENTS = {
    r"mend|mends|mended|mending": "fix",
    r"told|untold": "reported, logged, printed, given",
    r"tells (?:a person|people|whoever|nobody)": "reports, prints",
    r"wanted|unwanted": "expected, requested, settings",
    r"let be": "leave unchanged",
    r"(?:is|are|was|were) to be had": "is available",
    r"comes to (?:more|less|the|an|a|its|nothing|that)": "equals, amounts to",
    r"the one that|the ones that": "which, the <noun> that",
    r"in the place of": "instead of",
    r"has gone|have gone|had gone": "exited, was deleted",
    r"goes on|went on|go on": "continues, resumes",
    r"takes? in what|took in": "wait for, read",
    r"nobody": "unused, no user, none",
    r"a person|persons": "the user",
    r"whoever|whomever": "the user, any caller",
    r"somebody|somebody's": "the user, another process",
    r"anew": "again, from the start",
    r"hears? of|heard of": "is notified of",
    r"way out": "NAT route, fix",
    r"beside (?:that|this|it|them|the|a|each)": "next to, compared with, in addition to",
    r"legal": "allowed",
    r"without rights": "non-root",
    r"out of step": "different versions",
    r"passed over": "skipped",
    r"be done again|done again": "repeated",
    r"gives? up its": "releases",
    r"of its own accord": "by itself",
    r"half-made": "partly created",
    r"lets? go": "release",
    r"is there already": "exists",
}
BANNED = [
    (re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE), use) for words, use in REPLACEMENTS.items()
]

#: (file, phrase in the line): the word is right here.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("tests/cluster/test_cluster_cli.py", "pods_wanted"): "a field of `status --json`",
    ("workloads/cli/render.py", "pods_wanted"): "a field of `status --json`",
    ("workloads/runs/snapshot.py", "pods_wanted"): "a field of `status --json`",
}


def read_files() -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the lines of every tracked file with text for readers."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in SUFFIXES and path.is_file() and not NOT_READ.search(name):
            yield name, path.read_text(encoding="utf-8").splitlines()


def find_banned(name: str, lines: list[str], used: set[tuple[str, str]]) -> Iterator[str]:
    """Yield one message per banned word in a file; add the exceptions that applied to `used`."""
    allowed = [key for key in EXCEPTIONS if key[0] == name]
    for number, line in enumerate(lines, 1):
        excused = [key for key in allowed if key[1] in line]
        for pattern, instead in BANNED:
            for match in pattern.finditer(line):
                covering = [key for key in excused if match.group().lower() in key[1].lower()]
                used.update(covering)
                if not covering:
                    yield f"{name}:{number}: {match.group()!r}: write {instead}"


def main() -> int:
    """Print every banned word and every exception that no line needs; return 1 if there is any."""
    used: set[tuple[str, str]] = set()
    found = [message for name, lines in read_files() for message in find_banned(name, lines, used)]
    found += [f"{key[0]}: no line needs the exception {key[1]!r}" for key in EXCEPTIONS if key not in used]
    for message in found:
        print(message)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
