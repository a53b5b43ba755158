"""A 64-bit hash of integers and byte strings. It must never change, because trained embedding rows depend on it.

    mix(x)    = the splitmix64 generator's output for state x (Steele, Lea, Flood, OOPSLA 2014)
    integer i : mix(i as 64-bit two's complement)
    string s  : h = mix(number of bytes); then h = mix(h xor w) for every 8 bytes w of s (UTF-8, little-endian, the last
                ones padded with zeros)

The row is the unsigned hash modulo the rows of the table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_CHUNK = 8_192  # words mixed at once; they stay in the L1 cache, which is three times faster


def hash_integers(values: npt.NDArray[np.int64]) -> Words:
    """Return the hash of each integer."""
    words = values.astype(np.uint64)
    for start in range(0, words.size, _CHUNK):
        _mix(words[start : start + _CHUNK])
    return words


def hash_strings(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Words:
    """Return the hash of each string; string i is `data[offsets[i]:offsets[i + 1]]`."""
    padded = np.zeros(data.size + 16, dtype=np.uint8)
    padded[: data.size] = data
    eight_bytes_at = np.ndarray((data.size + 9,), dtype="<u8", buffer=padded, strides=(1,))
    hashes = np.empty(offsets.size - 1, dtype=np.uint64)
    for start in range(0, hashes.size, _CHUNK):
        part = slice(start, min(start + _CHUNK, hashes.size))
        starts = offsets[start : part.stop]
        hashes[part] = _hash_some(eight_bytes_at, starts, offsets[start + 1 : part.stop + 1] - starts)
    return hashes


def _hash_some(eight_bytes_at: Words, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Words:
    """Return the hashes of strings that start at `starts`."""
    hashes = _mix(lengths.astype(np.uint64))
    shortest, longest = int(lengths.min(initial=2**62)), int(lengths.max(initial=0))
    if shortest == longest:
        return _hash_equal(eight_bytes_at[int(starts[0]) :], hashes, longest)
    for done in range(0, longest, 8):
        longer = slice(None) if shortest > done else np.flatnonzero(lengths > done)
        words = eight_bytes_at[starts[longer] + done]
        missing = np.maximum(8 - (lengths[longer] - done), 0).astype(np.uint64)
        words &= np.uint64(2**64 - 1) >> (missing << np.uint64(3))
        hashes[longer] = _mix(hashes[longer] ^ words)
    return hashes


def _hash_equal(eight_bytes_at: Words, hashes: Words, length: int) -> Words:
    """Return the hashes of contiguous strings of one length, which need strides instead of a gather."""
    for done in range(0, length, 8):
        words = eight_bytes_at[done : done + hashes.size * length : length]
        if length - done < 8:
            words = words & np.uint64(2 ** (8 * (length - done)) - 1)
        hashes ^= words
        _mix(hashes)
    return hashes


def _mix(words: Words) -> Words:
    """Apply `mix` to each word in place."""
    words += _GOLDEN
    for shift, factor in _STEPS:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words
