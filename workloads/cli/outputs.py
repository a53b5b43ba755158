"""The outputs of a stack, through the `pulumi` command: the one place here that knows about it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.text import one_line
from workloads.cli.errors import CliError

ROOT = Path(__file__).resolve().parents[2]


def stack_outputs(stack: str) -> Mapping[str, Any]:
    """Every output of a stack, secrets in clear: they stay in this process. Raises CliError."""
    program = shutil.which("pulumi")
    if program is None:
        raise CliError(
            f"no `pulumi` on PATH, which knows where stack {stack!r} is; install it (pulumi.com/docs/install), or say "
            "where the run is: --kubeconfig FILE --namespace N --run R"
        )
    answer = _ask(program, ["stack", "output", "--json", "--show-secrets", "--stack", stack])
    if answer.returncode:
        raise CliError(_refusal(program, stack, answer.stderr))
    try:
        found = json.loads(answer.stdout or "{}")
    except json.JSONDecodeError:
        # What it printed may hold the kubeconfig, so it is not repeated.
        raise CliError(
            f"`pulumi stack output --json --stack {stack}` printed no JSON; is `pulumi` up to date?"
        ) from None
    if "job" not in found:
        raise CliError(f"stack {stack!r} has no output `job`: it is not up yet; `pulumi up --stack {stack}` makes it")
    outputs: Mapping[str, Any] = found
    return outputs


def _ask(program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # pulumi, with arguments of our own
        [program, *arguments, "--non-interactive", "--cwd", str(ROOT)], capture_output=True, text=True, check=False
    )


def _refusal(program: str, stack: str, said: str) -> str:
    """Why `pulumi` gave no outputs, and what to do."""
    reason = one_line(said.replace("error: ", "")) or "it did not say why"
    if "no stack named" in said or "not found" in said:
        return f"no stack {stack!r}; there are: {_stacks(program)}; `pulumi stack init {stack}` makes one"
    if "PULUMI_ACCESS_TOKEN" in said or "login" in said or "logged in" in said or "unauthorized" in said.lower():
        return f"`pulumi` is not logged in ({reason}); `pulumi login` mends it"
    if "passphrase" in said:
        return (
            f"the secrets of stack {stack!r} are locked ({reason}); set PULUMI_CONFIG_PASSPHRASE or "
            "PULUMI_CONFIG_PASSPHRASE_FILE"
        )
    return f"`pulumi stack output --stack {stack}` failed: {reason}"


def _stacks(program: str) -> str:
    answer = _ask(program, ["stack", "ls", "--json"])
    try:
        names = [str(row["name"]) for row in json.loads(answer.stdout or "[]")]
    except (json.JSONDecodeError, KeyError, TypeError):
        names = []
    return ", ".join(names) or "none"
