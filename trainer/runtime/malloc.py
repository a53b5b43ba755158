"""glibc allocator settings that keep freed memory for the next step.

By default glibc maps every large buffer separately and unmaps it after use. Each step then touches hundreds of
megabytes for the first time, with a page fault every 4 KiB. No default keeps a buffer above 32 MiB (mallopt(3),
M_MMAP_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.errors import UserError

if TYPE_CHECKING:
    import torch

#: Number of the parameter in glibc's malloc.h, and its value. Buffers of any size come from the heap. The heap returns
#: memory to the system only beyond 2 GiB and grows by 64 MiB at a time; one heap for all threads avoids unused copies.
_KEEP = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 2**26)}
_KEEP |= {"M_ARENA_MAX": (-8, 1)}
#: The same with bounded memory: keep only buffers below 32 MiB, and at most 128 MiB of them at the top of the heap.
_KEEP_SMALL = {"M_MMAP_THRESHOLD": (-3, 2**25), "M_TRIM_THRESHOLD": (-1, 2**27), "M_TOP_PAD": (-2, 2**22)}
_KEEP_SMALL |= {"M_ARENA_MAX": (-8, 1)}


def apply_malloc(mode: str, device: torch.device) -> str:
    """Set this process's allocator by `train.malloc`; return "keep" or "system", whichever is now in use.

    Raises UserError for "keep" if the C library is not glibc or rejects a parameter.
    """
    glibc = platform.libc_ver()[0] == "glibc"
    if mode == "keep" and not glibc:
        raise UserError("train.malloc is keep, which needs glibc, but this is another C library; allowed: auto, system")
    if mode == "system" or not glibc or (mode == "auto" and device.type != "cpu"):
        return "system"
    rejected = _set_parameters(_KEEP)
    if rejected and mode == "keep":
        names = ", ".join(rejected)
        raise UserError(f"train.malloc is keep, but this C library rejects {names}; allowed: auto, system")
    return "system" if rejected else "keep"


def keep_small_buffers() -> None:
    """Keep freed buffers below 32 MiB, on glibc only: page faults take half the time of work in blocks of megabytes."""
    if platform.libc_ver()[0] == "glibc":
        _set_parameters(_KEEP_SMALL)


def _set_parameters(parameters: Mapping[str, tuple[int, int]]) -> list[str]:
    """Set allocator parameters and return the names of those that this C library rejects."""
    mallopt = ctypes.CDLL(None).mallopt
    return [name for name, (number, value) in parameters.items() if not mallopt(number, value)]
