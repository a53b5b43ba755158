"""Arithmetic precision: what a device supports, what `train.precision auto` selects, and how it is applied."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from trainer.errors import UserError

Precision = Literal["fp32", "tf32", "bf16"]


def has_native_bf16(device: torch.device) -> bool:
    """Return whether `device` multiplies bf16 matrices in hardware; a CPU without is about 50 times slower in bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & _cpu_flags())


def choose_precision(requested: str, device: torch.device) -> tuple[Precision, str]:
    """Return the precision to use and the reason; raise UserError if `device` does not support the requested one."""
    if requested == "auto":
        if has_native_bf16(device):
            return "bf16", "the device multiplies bf16 in hardware"
        return "fp32", "the device has no native bf16"
    if requested == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UserError(
            f"train.precision is tf32, which this {device.type} does not support; allowed: auto, fp32, bf16"
        )
    if requested == "bf16" and not has_native_bf16(device):
        raise UserError(
            "train.precision is bf16, but this device has no native bf16 (about 50 times slower than fp32); "
            "allowed: auto, fp32"
        )
    assert requested in ("fp32", "tf32", "bf16")
    return requested, "as requested"  # type: ignore[return-value]  # narrowed by the assertion above


def apply_precision(precision: Precision) -> None:
    """Set process-wide switches: TF32 matrix products if requested (torch's default is fp32), denormals to zero."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.set_flush_denormal(True)


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """Return the context in which dense layers run."""
    if precision == "bf16":
        return torch.autocast(device_type=device_type, dtype=torch.bfloat16, cache_enabled=False)
    return nullcontext()


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: fp32 works everywhere
        return set()
    return {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.split(":", 1)[1].split()
    }
