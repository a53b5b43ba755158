"""The outputs of a stack, read with the `pulumi` command."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.text import one_line
from workloads.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def stack_outputs(stack: str) -> Mapping[str, Any]:
    """Return all outputs of a stack, with secrets in clear text; raise UserError if they cannot be read."""
    program = shutil.which("pulumi")
    if program is None:
        raise UserError(
            f"`pulumi` is not on PATH, so the outputs of stack {stack!r} cannot be read. Fix: install it "
            "(pulumi.com/docs/install), or pass --kubeconfig FILE --namespace N --run R"
        )
    answer = _run_pulumi(program, ["stack", "output", "--json", "--show-secrets", "--stack", stack])
    if answer.returncode:
        raise UserError(_explain_failure(program, stack, answer.stderr))
    try:
        found = json.loads(answer.stdout or "{}")
    except json.JSONDecodeError:
        # The output may contain the kubeconfig, so the message does not quote it.
        raise UserError(f"`pulumi stack output --json --stack {stack}` printed no JSON. Fix: update `pulumi`") from None
    if "job" not in found:
        raise UserError(f"stack {stack!r} has no output `job`: it is not up yet. Fix: pulumi up --stack {stack}")
    outputs: Mapping[str, Any] = found
    return outputs


def _run_pulumi(program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `pulumi` in the repository and capture what it prints."""
    return subprocess.run(  # noqa: S603  # pulumi, with arguments of our own
        [program, *arguments, "--non-interactive", "--cwd", str(ROOT)], capture_output=True, text=True, check=False
    )


def _explain_failure(program: str, stack: str, stderr: str) -> str:
    """Return why `pulumi` printed no outputs, and the fix."""
    reason = one_line(stderr.replace("error: ", "")) or "no reason printed"
    if "no stack named" in stderr or "not found" in stderr:
        return f"unknown stack: got {stack!r}; allowed: {_stack_names(program)}. Fix: pulumi stack init {stack}"
    if any(word in stderr.lower() for word in ("pulumi_access_token", "login", "logged in", "unauthorized")):
        return f"`pulumi` is not logged in ({reason}). Fix: pulumi login"
    if "passphrase" in stderr:
        return (
            f"the secrets of stack {stack!r} are locked ({reason}). Fix: set PULUMI_CONFIG_PASSPHRASE or "
            "PULUMI_CONFIG_PASSPHRASE_FILE"
        )
    return f"`pulumi stack output --stack {stack}` failed: {reason}"


def _stack_names(program: str) -> str:
    """Return the names of the existing stacks, or `none`."""
    answer = _run_pulumi(program, ["stack", "ls", "--json"])
    try:
        names = [str(row["name"]) for row in json.loads(answer.stdout or "[]")]
    except (json.JSONDecodeError, KeyError, TypeError):
        names = []
    return ", ".join(names) or "none"
