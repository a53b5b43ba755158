"""Checks of the training job, through the JSON and the logs of `python -m workloads`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from infra.doctor.tools import ROOT
from infra.findings.common_causes import API_CLOSED, JOB, JOB_LOG, LOCKED_MEMORY
from infra.findings.model import Check, Finding, QueryFailedError, ok, problem, skipped

_SECONDS = 60.0
_GOOD_STATES = ("running", "succeeded", "stopped", "queued")
#: An error of the trainer, of Python, or of the libraries below.
_ERROR = re.compile(r'^error: |^[\w.]*(Error|Exception)\b(:|$)|NCCL (WARN|ERROR)|CUDA error|Xid|"event": "\w+_failed"')
_TAIL_LINES = "2000"


def checks(stack: str, needs: str) -> list[Check]:
    """Return the checks of the job and its logs; both need the check `needs`."""
    return [
        Check("job", lambda: job(stack), needs, _SECONDS),
        Check("logs", lambda: logs(stack), needs, _SECONDS),
    ]


def job(stack: str) -> Finding | list[Finding]:
    """Check the run's state and its pods."""
    answer = _run_workloads("status", "--stack", stack, "--json")
    snapshot = json.loads(answer.stdout)
    pods = [f"pod {pod['name']}: {pod['why']}" for pod in snapshot["pods"] if pod.get("why")]
    helpers = [f"{item['component']}: {item['why']}" for item in snapshot["companions"] if item.get("why")]
    reason = f": {snapshot['why']}" if snapshot.get("why") else ""
    result = f"run {snapshot['run']} is {snapshot['state']}{reason}"
    if snapshot["state"] in _GOOD_STATES and not pods and not helpers:
        step = (snapshot.get("metrics") or {}).get("step")
        return ok(result + (f", at step {step:,}" if step else ""))
    return [_locked_memory(line, stack) or problem(JOB, line, stack=stack) for line in ([*pods, *helpers] or [result])]


def logs(stack: str) -> Finding | list[Finding]:
    """Report the first error in each pod's log; a missing log is no error."""
    answer = _run_workloads("logs", "--stack", stack, "--tail", _TAIL_LINES, "--no-pretty", allow=(0, 1, 2))
    if answer.returncode and not answer.stdout:
        return skipped(_last_line(answer.stderr) or "no log yet")
    first: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        # `logs` prefixes each line with the pod's name only if there are several pods.
        pod, gap, rest = line.partition("  ")
        name, text = (pod, rest) if gap and re.fullmatch(r"[a-z0-9.-]+", pod) else ("", line)
        if _ERROR.search(text.strip()):
            first.setdefault(name, text.strip()[:200])
    found = [
        _locked_memory(line, stack) or problem(JOB_LOG, line, stack=stack, pod=name or "<pod>")
        for name, text in first.items()
        for line in [f"{name + ': ' if name else ''}{text}"]
    ]
    return found or ok(f"no error in the last {len(answer.stdout.splitlines()):,} lines")


def _locked_memory(line: str, stack: str) -> Finding | None:
    """Return the problem of a process that may not lock the memory of its network cards, None for other errors."""
    return problem(LOCKED_MEMORY, line, stack=stack) if "RLIMIT_MEMLOCK" in line else None


def _run_workloads(*words: str, allow: Sequence[int] = (0, 1)) -> subprocess.CompletedProcess[str]:
    """Run a command of `python -m workloads` in a separate process, because infra must not import workloads."""
    answer = subprocess.run(  # noqa: S603 - this Python, with arguments of our own
        [sys.executable, "-m", "workloads", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    if answer.returncode not in allow:
        raise QueryFailedError(API_CLOSED, _last_line(answer.stderr) or f"`python -m workloads {words[0]}` failed")
    return answer


def _last_line(text: str) -> str:
    """Return the last line of an error output that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:300] if lines else ""
