"""Random numbers that depend only on (seed, stream, sample index), in torch integers on any device.

Shapes: B samples, C columns (independent numbers per sample). Integers are two's complement and wrap around. `>>` of a
signed integer copies its sign, so shifts are masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-32  # word * UNIT + 0.5 is uniform in [0, 1]
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64: Steele, Lea, Flood, OOPSLA 2014
_MIX64 = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_MIX32 = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))  # lowbias32 by Chris Wellons, hash-prospector


def sample_keys(seed: int, stream: int, num_streams: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return a 64-bit key per sample, (B,) int64; samples and streams of one seed never share a key.

    `seed` is a word from `seed_word`.
    """
    first, end = (index * num_streams + stream for index in (start, start + count))
    return _mix64(torch.arange(first, end, num_streams, dtype=torch.int64, device=device).add_(seed))


def seed_word(seed: int) -> int:
    """Return the start of a seed's keys, far enough from other seeds that their keys do not overlap."""
    return int(_mix64(torch.tensor([(seed + 1) % 2**63], dtype=torch.int64)))


def column_salts(num_columns: int, device: torch.device) -> Tensor:
    """Return a fixed 32-bit number per column, (C, 1) int32."""
    words_C = _mix64(torch.arange(num_columns, dtype=torch.int64))
    return words_C.to(torch.int32)[:, None].to(device)


def random_words(keys_B: Tensor, salts_C1: Tensor) -> Tensor:
    """Mix both halves of each sample's key with each column's salt to uniform 32-bit words, (C, B) int32."""
    low_B, high_B = keys_B.to(torch.int32), (keys_B >> 32).to(torch.int32)
    words_CB = torch.bitwise_xor(low_B, salts_C1)
    scratch_CB = torch.empty_like(words_CB)
    for shift, factor in _MIX32:
        _xor_shift(words_CB, shift, 32, scratch_CB).mul_(factor)
    words_CB.add_(high_B)
    for shift, factor in _MIX32:
        _xor_shift(words_CB, shift, 32, scratch_CB).mul_(factor)
    return _xor_shift(words_CB, 16, 32, scratch_CB)


def _mix64(values: Tensor) -> Tensor:
    """Apply the output function of splitmix64, a bijection, to each int64 in place."""
    values.mul_(_GOLDEN)
    scratch = torch.empty_like(values)
    for shift, factor in _MIX64:
        _xor_shift(values, shift, 64, scratch).mul_(factor)
    return _xor_shift(values, 31, 64, scratch)


def _xor_shift(values: Tensor, shift: int, bits: int, scratch: Tensor) -> Tensor:
    """Compute values ^= values >>> shift in place."""
    torch.bitwise_right_shift(values, shift, out=scratch)
    scratch.bitwise_and_((1 << (bits - shift)) - 1)
    return values.bitwise_xor_(scratch)
