"""Makes glibc keep the memory that a step frees, for the next step to use.

By default it maps every large buffer anew and returns it after use, so that each step touches hundreds of megabytes for
the first time: a page fault every 4 KiB. Above 32 MiB per buffer no default keeps any (mallopt(3), M_MMAP_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import platform

import torch

from trainer.errors import UserError

#: malloc.h of glibc: the parameter's number, and the value. Buffers of any size come from the heap, whose top goes back
#: to the system only beyond 2 GiB and grows by 64 MiB at a time; threads share one heap instead of hoarding one each.
_KEEP = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 2**26)}
_KEEP |= {"M_ARENA_MAX": (-8, 1)}


def apply_malloc(wanted: str, device: torch.device) -> str:
    """Set this process's allocator as `train.malloc` says: "keep" or "system", whichever it is now.

    Raises UserError for "keep" where the C library is not glibc.
    """
    glibc = platform.libc_ver()[0] == "glibc"
    if wanted == "keep" and not glibc:
        raise UserError("train.malloc is keep, which needs glibc, and this is another C library; legal: auto, system")
    if wanted == "system" or not glibc or (wanted == "auto" and device.type != "cpu"):
        return "system"
    mallopt = ctypes.CDLL(None).mallopt
    refused = [name for name, (number, value) in _KEEP.items() if not mallopt(number, value)]
    if refused and wanted == "keep":
        raise UserError(f"train.malloc is keep, but this C library refuses {', '.join(refused)}; legal: auto, system")
    return "system" if refused else "keep"
