"""Parse Criteo's tab-separated text, all fields of a block of rows at once.

No CSV library parses hexadecimal numbers, and reading 26 columns as strings first takes longer than this parser. A
field of at most eight characters is one 64-bit word, so its digits are checked and combined by arithmetic on that word
("SWAR"). Longer numbers and malformed rows are handled by ordinary code. Speed depends on few passes over contiguous
arrays, so fields are the first dimension and rows the second.

Shapes: N rows, 13 integers and 26 hexadecimal ids per row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
FIELDS = 1 + CRITEO_NUM_DENSE + CRITEO_NUM_SPARSE
_INTEGERS = 1 + CRITEO_NUM_DENSE  # fields before the hexadecimal ones
_TAB, _NEWLINE, _MINUS, _SPACE = 9, 10, 45, 32
_BLOCK_ROWS = 2_048  # intermediate arrays fit about into the second-level cache
_FEW_ROWS = 64  # smaller chunks with a bad row are parsed row by row, larger ones are halved
_INT = re.compile(rb"(-?[0-9]{1,10})?")
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")
_INT32 = range(-(2**31), 2**31)


def _every_byte(value: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([value]) * 8, "little"))


_ONE, _THREE, _FOUR, _SIX, _EIGHT, _63 = (np.uint64(n) for n in (1, 3, 4, 6, 8, 63))
_ONES, _SIXES, _ZERO_DIGITS = _every_byte(1), _every_byte(6), _every_byte(ord("0"))
_UPPER_HALVES, _NIBBLES = _every_byte(0xF0), _every_byte(0x0F)
_UPPER_CASE = _every_byte(ord("a") ^ ord("A"))
# The excess of "a" ^ "0" over 10.
_LETTER = np.uint16((ord("a") ^ ord("0")) - 10)


@dataclass(frozen=True)
class Rows:
    """Parsed rows: `labels` (N,), `dense` (N, 13), both int32 with 0 for missing values, `sparse` (26, N) uint32."""

    labels: npt.NDArray[np.int32]
    dense: npt.NDArray[np.int32]
    sparse: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Text:
    """Complete lines: the first `size` bytes of `words`, which has at least one word of padding after them."""

    words: Words
    size: int

    @staticmethod
    def of(lines: bytes) -> Text:
        """Copy lines that end in a newline."""
        text = Text.allocate(len(lines))
        text.characters[:] = np.frombuffer(lines, np.uint8)
        return text

    @staticmethod
    def allocate(size: int) -> Text:
        """Allocate a text to be filled."""
        return Text(np.empty(size // 8 + 2, np.uint64), size)

    @property
    def characters(self) -> npt.NDArray[np.uint8]:
        """Return a view of the text as bytes, (size,)."""
        return self.words.view(np.uint8)[: self.size]


@dataclass(frozen=True)
class BadRow:
    """A malformed row: its number in the chunk, counted from 0, and the reason."""

    number: int
    reason: str


def parse(text: Text) -> tuple[Rows, list[BadRow]]:
    """Return the valid rows of a text, and the malformed ones separately."""
    rows = _parse_all(text)
    return (rows, []) if rows is not None else _parse_piecewise(text.characters.tobytes().replace(b"\r\n", b"\n"))


def _parse_piecewise(lines: bytes) -> tuple[Rows, list[BadRow]]:
    rows = _parse_all(Text.of(lines))
    if rows is not None:
        return rows, []
    count = lines.count(b"\n")
    if count > _FEW_ROWS:
        middle = lines.index(b"\n", len(lines) // 2) + 1
        if middle == len(lines):
            middle = lines.rindex(b"\n", 0, len(lines) - 1) + 1
        halves = _parse_piecewise(lines[:middle]), _parse_piecewise(lines[middle:])
        return _join(*halves, lines.count(b"\n", 0, middle))
    bad = [BadRow(i, reason) for i, line in enumerate(lines.split(b"\n")[:-1]) if (reason := row_error(line))]
    numbers = {row.number for row in bad}
    good = b"".join(line + b"\n" for i, line in enumerate(lines.split(b"\n")[:-1]) if i not in numbers)
    rows = _parse_all(Text.of(good))
    assert rows is not None, "the two parsers disagree about what a good row is"
    return rows, bad


def row_error(line: bytes) -> str | None:
    """Return what is wrong with a row, or None, by ordinary code equivalent to the arithmetic below."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != FIELDS:
        allowed = f"{FIELDS} (label, {CRITEO_NUM_DENSE} integers, {CRITEO_NUM_SPARSE} ids)"
        return f"wrong number of columns: got {len(fields)}; allowed: {allowed}"
    for i, field in enumerate(fields):
        value = field[:40].decode("utf-8", "backslashreplace")
        if i <= CRITEO_NUM_DENSE:
            if not _INT.fullmatch(field) or int(field or 0) not in _INT32:
                return f"wrong value in column {i + 1}: got {value!r}; allowed: a 32-bit integer or nothing"
            if i == 0 and int(field or 0) not in (0, 1):
                return f"wrong label in column 1: got {value!r}; allowed: 0 or 1"
        elif not _HEX.fullmatch(field):
            return f"wrong value in column {i + 1}: got {value!r}; allowed: up to 8 hexadecimal digits or nothing"
    return None


def _join(first: tuple[Rows, list[BadRow]], second: tuple[Rows, list[BadRow]], lines: int) -> tuple[Rows, list[BadRow]]:
    (one, bad_one), (two, bad_two) = first, second
    rows = Rows(
        np.concatenate([one.labels, two.labels]),
        np.concatenate([one.dense, two.dense]),
        np.concatenate([one.sparse, two.sparse], axis=1),
    )
    return rows, bad_one + [BadRow(lines + bad.number, bad.reason) for bad in bad_two]


def _parse_all(text: Text) -> Rows | None:
    """Return all rows, or None if any row is malformed."""
    characters = text.characters
    separators = np.flatnonzero(characters < _SPACE)  # tabs, newlines, and characters that no valid row has
    count = separators.size // FIELDS
    if separators.size % FIELDS or np.count_nonzero(characters == _TAB) != count * (FIELDS - 1):
        return None
    ends = separators.reshape(count, FIELDS)
    if (characters[ends[:, -1]] != _NEWLINE).any():  # so with both counts, all others are tabs
        return None
    rows = Rows(
        np.empty(count, np.int32),
        np.empty((count, CRITEO_NUM_DENSE), np.int32),
        np.empty((CRITEO_NUM_SPARSE, count), np.uint32),
    )
    for at in range(0, count, _BLOCK_ROWS):
        part = slice(at, at + _BLOCK_ROWS)
        edges = _edges(ends[part], separators[at * FIELDS - 1] if at else -1)
        starts = edges[:-1] + 1
        lengths = edges[1:] - starts
        words = _words_from(text.words, starts)
        numbers = _integers(characters, words[:_INTEGERS], starts[:_INTEGERS], lengths[:_INTEGERS])
        ids = _hexadecimals(words[_INTEGERS:], lengths[_INTEGERS:])
        if numbers is None or ids is None:
            return None
        rows.labels[part], rows.dense[part], rows.sparse[:, part] = numbers[0], numbers[1:].T, ids
    return None if ((rows.labels & ~1) != 0).any() else rows


def _edges(ends: Positions, before: int) -> Positions:
    """Return the separators of each row after the one before it, (FIELDS + 1, N); `before` precedes the first row."""
    edges = np.empty((FIELDS + 1, ends.shape[0]), np.int64)
    edges[1:] = ends.T
    edges[0, 1:] = ends[:-1, -1]
    edges[0, 0] = before
    return edges


def _words_from(words: Words, starts: Positions) -> Words:
    """Return the eight bytes from each position on.

    They are combined from the two aligned words that contain them: numpy gathers unaligned words four times slower.
    """
    at = starts >> 3
    low, high = words.take(at, mode="clip"), words[1:].take(at, mode="clip")
    bits = (starts.view(np.uint64) << _THREE) & _63
    low >>= bits
    bits ^= _63  # 64 - bits in two steps, because a word cannot be shifted by 64
    high <<= _ONE
    high <<= bits
    low |= high
    return low


def _integers(
    characters: npt.NDArray[np.uint8], words: Words, starts: Positions, lengths: Positions
) -> npt.NDArray[np.int64] | None:
    """Parse fields as decimal numbers; return None if one is not a 32-bit integer. Overwrites `words` and `lengths`."""
    words, lengths = words.reshape(-1), lengths.reshape(-1)
    minus = np.flatnonzero(words.view(np.uint8)[::8] == _MINUS)
    long = np.flatnonzero(lengths > 8) if lengths.max(initial=0) > 8 else minus[:0]
    lengths_long = lengths[long]
    if minus.size:
        words[minus] >>= _EIGHT
        lengths[minus] -= 1
        if not lengths[minus].all():
            return None
    lengths[long] = 0
    _to_digits(words, lengths)
    if (np.bitwise_or.reduce(words, axis=None) | np.bitwise_or.reduce(words + _SIXES, axis=None)) & _UPPER_HALVES:
        return None  # a byte is above 9, found by its upper half before or after adding 6
    # Three steps combine neighbours: 8 digits to 4 pairs, to 2 groups of four, to 1 number. The first digit is the
    # lowest byte; a multiplication adds ten times its value to the next one.
    for kind, ten, bits in ((np.uint16, 10, 8), (np.uint32, 100, 16), (np.uint64, 10_000, 32)):
        lanes: npt.NDArray[Any] = words.view(kind)
        lanes *= kind((ten << bits) + 1)
        lanes >>= kind(bits)
    numbers = words.view(np.int64)
    numbers[minus] *= -1
    for place, length in zip(long, lengths_long, strict=True):
        start = starts.flat[place]
        field = characters[start : start + length].tobytes()
        if not _INT.fullmatch(field) or int(field) not in _INT32:
            return None
        numbers[place] = int(field)
    return numbers.reshape(_INTEGERS, -1)


def _hexadecimals(words: Words, lengths: Positions) -> npt.NDArray[np.uint32] | None:
    """Parse fields as hexadecimal numbers; return None if one is malformed. Overwrites `words`."""
    if lengths.max(initial=0) > 8:
        return None
    _to_digits(words, lengths)
    letters = words >> _SIX
    letters &= _ONES
    spare = np.empty_like(words)
    np.multiply(letters.view(np.uint16), _LETTER, out=spare.view(np.uint16))
    words -= spare  # now digits are 0 to 9, letters 10 to 15, and capital letters 32 more
    np.add(words, _SIXES, out=spare)
    spare >>= _FOUR
    spare ^= letters
    all_bits = np.bitwise_or.reduce(words, axis=None)
    if np.bitwise_or.reduce(spare, axis=None) & _ONES or all_bits & _UPPER_HALVES & ~_UPPER_CASE:
        return None  # a non-letter of 10 or more, a letter below 10, or another character
    if all_bits & _UPPER_CASE:
        words &= _NIBBLES
    pairs = words.view(np.uint16)
    pairs *= np.uint16((16 << 8) + 1)
    pairs >>= np.uint16(8)
    return pairs.astype(np.uint8).view(">u4").astype(np.uint32)


def _to_digits(words: Words, lengths: Positions) -> None:
    """Shift each field to the upper end of its word, with zeros below it, and map "0" to 0."""
    bits = np.subtract(64, lengths << 3).view(np.uint64)  # a shift by all 64 bits gives 0
    words <<= bits
    words ^= _ZERO_DIGITS << bits
