"""The Pulumi program exits silently when the engine interrupts it after a resource failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from provider_mocks.recording import ROOT

PROGRAM = """
import signal, sys, time
from infra.interrupt import exit_silently_on_interrupt
exit_silently_on_interrupt()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("started_by_the_engine", "code", "shown"), [(True, 32, ""), (False, -signal.SIGINT, "KeyboardInterrupt")]
)
def test_only_a_program_started_by_the_engine_exits_without_a_stack_trace(
    started_by_the_engine: bool, code: int, shown: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PULUMI_CONFIG"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"PULUMI_CONFIG": "{}"} if started_by_the_engine else {})
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == code
    assert shown in errors
    assert shown or not errors, "a stack trace would hide the line of the failed resource"
