"""train.malloc: the allocator keeps freed memory if that is requested and possible."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from small_jobs import environment

from trainer.errors import UserError
from trainer.runtime.malloc import apply_malloc

# Prints the page faults of ten buffers of 64 MiB, one after another, after the heap has reached its size.
FAULTS = """
import resource, sys, torch
from trainer.runtime.malloc import apply_malloc
print(apply_malloc(sys.argv[1], torch.device("cpu")))
def touch():
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    before = touch()
for _ in range(10):
    after = touch()
print(after - before)
"""


def faults(mode: str) -> tuple[str, int]:
    """Return the allocator in use and the page faults of a new process, because the settings cannot be undone."""
    command = [sys.executable, "-c", FAULTS, mode]
    chosen, count = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    return chosen, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_kept_as_configured() -> None:
    by_system = faults("system")
    assert by_system[0] == "system"
    assert by_system[1] > 1_000, "glibc keeps large buffers by default: the option has no effect any more"
    for mode in ("auto", "keep"):
        assert faults(mode) == ("keep", pytest.approx(0, abs=100)), "each buffer is mapped again"


def test_auto_keeps_the_default_on_gpus() -> None:
    assert apply_malloc("auto", torch.device("cuda")) == "system"


def test_keep_is_an_error_with_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert apply_malloc("auto", torch.device("cpu")) == "system"
    with pytest.raises(UserError, match=r"train\.malloc is keep, which needs glibc.*allowed: auto, system"):
        apply_malloc("keep", torch.device("cpu"))
