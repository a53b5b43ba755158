"""Makes glibc keep the memory that a step frees, for the next step to use.

By default it maps every large buffer anew and returns it after use, so that each step touches hundreds of megabytes for
the first time: a page fault every 4 KiB. Above 32 MiB per buffer no default keeps any (mallopt(3), M_MMAP_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.errors import UserError

if TYPE_CHECKING:
    import torch

#: malloc.h of glibc: the parameter's number, and the value. Buffers of any size come from the heap, whose top goes back
#: to the system only beyond 2 GiB and grows by 64 MiB at a time; threads share one heap instead of hoarding one each.
_KEEP = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 2**26)}
_KEEP |= {"M_ARENA_MAX": (-8, 1)}
#: The same within a bound on memory: only buffers below 32 MiB are kept, and at most 128 MiB of them at the heap's top.
_KEEP_SMALL = {"M_MMAP_THRESHOLD": (-3, 2**25), "M_TRIM_THRESHOLD": (-1, 2**27), "M_TOP_PAD": (-2, 2**22)}
_KEEP_SMALL |= {"M_ARENA_MAX": (-8, 1)}


def apply_malloc(wanted: str, device: torch.device) -> str:
    """Set this process's allocator as `train.malloc` says: "keep" or "system", whichever it is now.

    Raises UserError for "keep" where the C library is not glibc.
    """
    glibc = platform.libc_ver()[0] == "glibc"
    if wanted == "keep" and not glibc:
        raise UserError("train.malloc is keep, which needs glibc, and this is another C library; legal: auto, system")
    if wanted == "system" or not glibc or (wanted == "auto" and device.type != "cpu"):
        return "system"
    refused = _refused(_KEEP)
    if refused and wanted == "keep":
        raise UserError(f"train.malloc is keep, but this C library refuses {', '.join(refused)}; legal: auto, system")
    return "system" if refused else "keep"


def keep_small_buffers() -> None:
    """For work in blocks of some megabytes: without it half of the time goes into page faults. Only glibc is told."""
    if platform.libc_ver()[0] == "glibc":
        _refused(_KEEP_SMALL)


def _refused(wanted: Mapping[str, tuple[int, int]]) -> list[str]:
    """Sets the parameters; the names of those that this C library does not take."""
    mallopt = ctypes.CDLL(None).mallopt
    return [name for name, (number, value) in wanted.items() if not mallopt(number, value)]
