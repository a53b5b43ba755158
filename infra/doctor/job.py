"""The training job, as the terminal's own commands tell it: what a pod waits for is worked out in one place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from infra.doctor.tools import ROOT
from infra.findings.common_causes import API_CLOSED, JOB, JOB_LOG
from infra.findings.model import Check, Finding, QueryFailedError, ok, problem, skipped

_SECONDS = 60.0
_WELL = ("running", "succeeded", "stopped", "queued")
#: The trainer's own error, Python's, and those of the libraries below it.
_ERROR = re.compile(r'^error: |^[\w.]*(Error|Exception)\b(:|$)|NCCL (WARN|ERROR)|CUDA error|Xid|"event": "\w+_failed"')
_TAIL_LINES = "2000"


def checks(stack: str, needs: str) -> list[Check]:
    """The job and its logs."""
    return [
        Check("job", lambda: job(stack), needs, _SECONDS),
        Check("logs", lambda: logs(stack), needs, _SECONDS),
    ]


def job(stack: str) -> Finding | list[Finding]:
    """The run's state, and every pod that has something to say."""
    answer = _workloads("status", "--stack", stack, "--json")
    shot = json.loads(answer.stdout)
    pods = [f"pod {pod['name']}: {pod['why']}" for pod in shot["pods"] if pod.get("why")]
    helpers = [f"{item['component']}: {item['why']}" for item in shot["companions"] if item.get("why")]
    told = f"run {shot['run']} is {shot['state']}" + (f": {shot['why']}" if shot.get("why") else "")
    if shot["state"] in _WELL and not pods and not helpers:
        step = (shot.get("metrics") or {}).get("step")
        return ok(told + (f", at step {step:,}" if step else ""))
    return [problem(JOB, line, stack=stack) for line in ([*pods, *helpers] or [told])]


def logs(stack: str) -> Finding | list[Finding]:
    """The first error of each pod's log; a log that is not there yet is no error."""
    answer = _workloads("logs", "--stack", stack, "--tail", _TAIL_LINES, "--no-pretty", allow=(0, 1, 2))
    if answer.returncode and not answer.stdout:
        return skipped(_line(answer.stderr) or "no log yet")
    first: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        # With one pod there is no name in front.
        pod, gap, rest = line.partition("  ")
        name, text = (pod, rest) if gap and re.fullmatch(r"[a-z0-9.-]+", pod) else ("", line)
        if _ERROR.search(text.strip()):
            first.setdefault(name, text.strip()[:200])
    found = [
        problem(JOB_LOG, f"{name + ': ' if name else ''}{text}", stack=stack, pod=name or "<pod>")
        for name, text in first.items()
    ]
    return found or ok(f"no error in the last {len(answer.stdout.splitlines()):,} lines")


def _workloads(*words: str, allow: Sequence[int] = (0, 1)) -> subprocess.CompletedProcess[str]:
    """A command of `python -m workloads`, in a process of its own: infra does not import what runs on it."""
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
        raise QueryFailedError(API_CLOSED, _line(answer.stderr) or f"`python -m workloads {words[0]}` failed")
    return answer


def _line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:300] if lines else ""
