"""Tests of the guides: every command exists with its options, and every link has a target."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from markdown_it import MarkdownIt
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "tests").glob("*.md")]
    + [path for part in ("infra", "trainer", "workloads") for path in (ROOT / part).rglob("*.md")]
)
#: Programs of other projects; their options are not checked.
FOREIGN = {
    *(
        "aws",
        "az",
        "base64",
        "chmod",
        "curl",
        "docker",
        "eval",
        "export",
        "gcloud",
        "git",
        "grep",
        "helm",
        "kind",
        "kubectl",
    ),
    *("mkdir", "pip", "tensorboard", "torchrun"),
}
#: The commands of `pulumi` that this project documents.
PULUMI = {
    *("cancel", "config get", "config rm", "config set", "destroy", "install", "login", "preview", "refresh", "up"),
    "whoami",
    *("stack change-secrets-provider", "stack init", "stack ls", "stack output"),
}
_OPERATOR = {"&&", "||", "|", ";"}
_CODE = re.compile(r"^(?:(?:\.venv/bin/)?python -m (?:infra|workloads|trainer)|make [a-z]|pulumi [a-z]|python tests/)")
_SECTIONS = ("job", "trainer")


def fences(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each shell block, and whether the comment `run: local` precedes it."""
    marked = False
    for token in MarkdownIt().parse(path.read_text(encoding="utf-8")):
        if token.type == "html_block":
            marked = "<!-- run: local -->" in token.content
        elif token.type == "fence":
            if token.info.strip() in ("sh", "bash", "shell"):
                yield token.content, marked
            marked = False


def spans(path: Path) -> Iterator[str]:
    """Yield the commands inside sentences and tables."""
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline" and _CODE.match(child.content):
                yield child.content


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of a block, without comments and `NAME=value`; join continued lines and split pipes."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            # `...` is a placeholder for the reader's own text.
            part, ended = word.rstrip(";"), word in _OPERATOR or word.endswith(";")
            if part and part not in _OPERATOR and part != "...":
                words.append(part)
            if ended and words:
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []


def collect_commands() -> list[Any]:
    found = []
    for path in GUIDES:
        texts = [text for text, _ in fences(path)] + list(spans(path))
        for words in (words for text in texts for words in commands(text)):
            found.append(pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)}"[:110]))
    return found


EVERY = collect_commands()


def find_error(words: Sequence[str]) -> str | None:
    """Return why a command does not exist, or None if it does."""
    program, rest = Path(words[0]).name, list(words[1:])
    if program in ("python", "python3"):
        return check_python(rest)
    if program == "make":
        return check_make(rest)
    if program == "pulumi":
        return check_pulumi(rest)
    if program == "trainer":  # the console command of .venv
        return check_trainer(rest)
    if words[0] == ".":
        return None if rest == [".venv/bin/activate"] else f"unknown script {rest}"
    if program == "torchrun":
        return check_python(rest[rest.index("-m") :]) if "-m" in rest else None
    if program == "docker" and "trainer" in rest and rest[0] == "run":
        inner = rest[rest.index("trainer") + 1 :]
        return find_error(inner) if inner[:1] == ["torchrun"] else check_trainer(inner)
    return None if program in FOREIGN else f"unknown program {program}"


def check_python(rest: list[str]) -> str | None:
    if rest[:1] != ["-m"]:
        return None if (ROOT / rest[0]).is_file() else f"no file {rest[0]}"
    module, rest = rest[1], rest[2:]
    if module == "trainer":
        return check_trainer(rest)
    if module == "workloads.launchers.torchx":
        return None if rest[:1] and rest[0] in ("run", "status") else "TorchX has run and status"
    if module == "infra.monitoring":
        return None if rest in ([], ["dashboard"], ["alerts"]) else "it prints dashboard or alerts"
    if module not in ("infra", "workloads"):
        return f"no module {module}"
    entry = importlib.import_module(f"{module}.__main__")
    return check_parser(entry.parser() if module == "infra" else entry._parser(), rest)


def check_parser(parser: argparse.ArgumentParser, rest: list[str]) -> str | None:
    if not rest or rest in (["--help"], ["-h"]):
        return None
    # `status|logs` stands for both commands.
    for name in rest[0].split("|"):
        try:
            # A sentence may leave out the stack.
            given = [] if "--stack" in rest else ["--stack", "aws"]
            _, unknown = parser.parse_known_args([name, *rest[1:], *(given if takes_stack(parser, name) else [])])
        except SystemExit as error:
            if error.code:
                return f"refused: {' '.join(rest)}"
            continue
        if unknown:
            return f"no option {unknown[0]}"
    return None


def takes_stack(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether the command exists and has the option --stack."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return any("--stack" in action.choices[name]._option_string_actions for action in actions if name in action.choices)


def check_trainer(rest: list[str]) -> str | None:
    """Check the command and its options: those of the settings, of `launch`, and its own."""
    from trainer.config import leaves
    from trainer.config.options import option_name
    from trainer.main import _OWN_OPTIONS, COMMANDS
    from trainer.planning.options import options_parser

    names = rest[:1] if rest[:1] and not rest[0].startswith("-") else ["train"]
    if names[0] == "launch":
        inner = next((word for word in rest[1:] if word in COMMANDS), "train")
        names.append(inner)
    for name in names:
        if name not in COMMANDS:
            return f"the trainer has no command {name}"
    allowed = {f"--{option_name(path)}" for path in leaves()} | {"--config", "--help"}
    for name in names:
        allowed |= set(re.findall(r"--[a-z-]+", COMMANDS[name].__doc__ or ""))
        if name in _OWN_OPTIONS:
            allowed |= set(importlib.import_module(_OWN_OPTIONS[name]).parser()._option_string_actions)
        if name == "plan":
            allowed |= set(options_parser()._option_string_actions)
        if name == "bench":
            allowed |= {"--data", "--preprocess"}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in allowed]
    return f"no option {unknown[0]}" if unknown else None


def check_make(rest: list[str]) -> str | None:
    targets = set(re.findall(r"^([a-z-]+)(?=[ :a-z-]*:)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {
        f"install-{name}" for name in ("infra", "doctor", "test", "lint", "bootstrap", "trainer-cpu", "trainer-gpu")
    }
    wrong = [word for word in rest if "=" not in word and not word.startswith("-") and word not in targets]
    return f"no target {wrong[0]}" if wrong else None


def check_pulumi(rest: list[str]) -> str | None:
    verb = " ".join(rest[:2]) if rest[:1] in (["stack"], ["config"]) else rest[0]
    if verb not in PULUMI:
        return f"`pulumi {verb}` is not a command that this project uses"
    keys = [word for word in rest[2:] if re.match(r"^(torchrec-cloud:)?[a-z_]+(\.[a-z_]+|\[|$)", word)]
    if rest[0] == "config" and "--path" in rest and keys:
        key = keys[0].removeprefix("torchrec-cloud:")
        return None if any(has_key(model, key) for model in settings_classes(key)) else f"no key {key}"
    return None


def settings_classes(key: str) -> list[type[BaseModel]]:
    """Return the settings classes that may declare a stack's key."""
    from infra import clouds
    from trainer.config import TrainConfig
    from workloads.settings import JobSettings

    section = key.partition(".")[0]
    if section in _SECTIONS:
        return [JobSettings if section == "job" else TrainConfig]
    return [clouds.load(name).settings for name in clouds.available()]


def has_key(model: type[BaseModel], key: str) -> bool:
    parts = re.sub(r"\[.*?\]", "", key).split(".")
    if parts[0] in _SECTIONS:
        parts = parts[1:]
    current: Any = model
    for part in parts:
        # The items of a list of sections have its type's first argument.
        current = next((one for one in get_args(current) if hasattr(one, "model_fields")), current)
        fields = getattr(current, "model_fields", None)
        if not fields or part not in fields:
            return False
        current = fields[part].annotation
    return True


@pytest.mark.parametrize("words", EVERY)
def test_a_command_in_a_guide_exists_with_its_options(words: list[str]) -> None:
    assert find_error(words) is None


@pytest.mark.parametrize(
    "line",
    [
        "make quickstrat",
        "python -m infra doctor --stak aws",
        "python -m infra diagnose --stack aws",
        "python -m workloads logs --stack aws --folow",
        "python -m trainer trian",
        "python -m trainer launch train --train.batchsize 8",
        "torchrun --nproc_per_node 2 -m trainer --no-such 1",
        "pulumi config set --path torchrec-cloud:gpu.node.max 4",
        "pulumi config set --path torchrec-cloud:job.lanucher job",
        "pulumi config set --path trainer.train.batchsize 8",
        "pulumi stack destroy",
        "python tests/no_such_file.py",
        "some-program --flag",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert [find_error(words) for words in commands(line)] != [None]


def test_the_guides_of_every_package_are_checked() -> None:
    names = {str(path.relative_to(ROOT)) for path in GUIDES}
    clouds = {f"infra/clouds/{path.name}/README.md" for path in (ROOT / "infra/clouds").iterdir() if path.is_dir()}
    expected = {
        "README.md",
        "infra/README.md",
        "workloads/README.md",
        "trainer/README.md",
        "infra/monitoring/README.md",
    }
    assert names >= expected | {name for name in clouds if "__pycache__" not in name}
    assert len(EVERY) > 150


LOCAL = [
    pytest.param(line, id=line)
    for path in GUIDES
    for text, marked in fences(path)
    if marked
    for line in (line.partition("  #")[0].strip() for line in text.splitlines())
    if line
]


@pytest.mark.parametrize("line", LOCAL)
def test_a_command_marked_local_succeeds(line: str) -> None:
    words = [sys.executable if word in ("python", ".venv/bin/python") else word for word in shlex.split(line)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRAINER_")}
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout


def test_some_commands_are_marked_local() -> None:
    assert len(LOCAL) >= 5


# --- links ---


def links(path: Path) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        for child in token.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if target:
                yield str(target)


def anchors(path: Path) -> set[str]:
    """Return GitHub's anchors of the headings: lower case, hyphens for spaces, a number after a repeated one."""
    found: list[str] = []
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    for opened, inline in pairwise(tokens):
        if opened.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = found.count(slug)
            found.append(slug if not count else f"{slug}-{count}")
    return set(found)


def find_broken(path: Path, target: str) -> str | None:
    """Return why a link is broken; None if it works or leaves the repository."""
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        return f"no file {name}"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return f"{file.name} has no heading #{anchor}"
    return None


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_a_guide_has_a_target(path: Path) -> None:
    assert [why for target in links(path) if (why := find_broken(path, target))] == []


def test_a_broken_link_is_found() -> None:
    readme = ROOT / "README.md"
    assert find_broken(readme, "no/such.md") == "no file no/such.md"
    assert find_broken(readme, "infra/README.md#no-such") == "README.md has no heading #no-such"
    assert find_broken(readme, "#quickstart") is None
    assert find_broken(readme, "https://example.com/x") is None
