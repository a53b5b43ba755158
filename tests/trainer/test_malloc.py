"""The allocator keeps a step's memory for the next one, where that is asked for and possible."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from small_jobs import environment

from trainer.errors import UserError
from trainer.runtime.malloc import apply_malloc

# New pages touched by ten buffers of 64 MiB, one after another, once the heap has grown to what they need.
FAULTS = """
import resource, sys, torch
from trainer.runtime.malloc import apply_malloc
print(apply_malloc(sys.argv[1], torch.device("cpu")))
def touched():
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    before = touched()
for _ in range(10):
    after = touched()
print(after - before)
"""


def faults(wanted: str) -> tuple[str, int]:
    """What it has come to, and the page faults, in a process of its own: an allocator cannot be set back."""
    command = [sys.executable, "-c", FAULTS, wanted]
    chosen, count = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    return chosen, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_kept_or_not_as_asked() -> None:
    by_system = faults("system")
    assert by_system[0] == "system"
    assert by_system[1] > 1_000, "glibc keeps large buffers by itself now: the option has become useless"
    for wanted in ("auto", "keep"):
        assert faults(wanted) == ("keep", pytest.approx(0, abs=100)), "each buffer is mapped anew"


def test_gpus_are_left_to_their_own_allocator() -> None:
    assert apply_malloc("auto", torch.device("cuda")) == "system"


def test_another_c_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert apply_malloc("auto", torch.device("cpu")) == "system"
    with pytest.raises(UserError, match=r"train\.malloc is keep, which needs glibc.*allowed: auto, system"):
        apply_malloc("keep", torch.device("cpu"))
