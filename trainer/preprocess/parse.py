"""Criteo's tab-separated text to numbers, all fields of a block of rows at once.

No CSV library has a parser for hexadecimal, and reading 26 columns as strings first costs more than all of this. A
field of at most eight characters is one 64-bit word, so its digits are checked and combined by arithmetic on that word
("SWAR"); what a chunk holds beyond that (long numbers, malformed rows) goes through plain code. Few passes count, and
that the arrays of a pass are contiguous: fields come first, rows second.

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
_BLOCK_ROWS = 2_048  # the arrays in between stay near the second-level cache
_FEW_ROWS = 64  # below this a chunk with a bad row is looked at row by row, above it is halved
_INT = re.compile(rb"(-?[0-9]{1,10})?")
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")
_INT32 = range(-(2**31), 2**31)


def _every_byte(value: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([value]) * 8, "little"))


_ONE, _THREE, _FOUR, _SIX, _EIGHT, _63 = (np.uint64(n) for n in (1, 3, 4, 6, 8, 63))
_ONES, _SIXES, _ZERO_DIGITS = _every_byte(1), _every_byte(6), _every_byte(ord("0"))
_UPPER_HALVES, _NIBBLES = _every_byte(0xF0), _every_byte(0x0F)
_UPPER_CASE = _every_byte(ord("a") ^ ord("A"))
# What "a" ^ "0" is above 10.
_LETTER = np.uint16((ord("a") ^ ord("0")) - 10)


@dataclass(frozen=True)
class Rows:
    """Parsed rows: `labels` (N,), `dense` (N, 13), both int32 with 0 for what is missing, `sparse` (26, N) uint32."""

    labels: npt.NDArray[np.int32]
    dense: npt.NDArray[np.int32]
    sparse: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Text:
    """Whole lines: the first `size` bytes of `words`, which go on for at least one word of anything."""

    words: Words
    size: int

    @staticmethod
    def of(lines: bytes) -> Text:
        """A copy of lines that end in a newline."""
        text = Text.room_for(len(lines))
        text.characters[:] = np.frombuffer(lines, np.uint8)
        return text

    @staticmethod
    def room_for(size: int) -> Text:
        """A text to be filled."""
        return Text(np.empty(size // 8 + 2, np.uint64), size)

    @property
    def characters(self) -> npt.NDArray[np.uint8]:
        """(size,), a view."""
        return self.words.view(np.uint8)[: self.size]


@dataclass(frozen=True)
class BadRow:
    """A row that is none: which one of its chunk, counted from 0, and why."""

    number: int
    reason: str


def parse(text: Text) -> tuple[Rows, list[BadRow]]:
    """The rows of a text; those in the wrong are left out and returned beside the good ones."""
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
        return _joined(*halves, lines.count(b"\n", 0, middle))
    bad = [BadRow(i, reason) for i, line in enumerate(lines.split(b"\n")[:-1]) if (reason := fault(line))]
    numbers = {row.number for row in bad}
    good = b"".join(line + b"\n" for i, line in enumerate(lines.split(b"\n")[:-1]) if i not in numbers)
    rows = _parse_all(Text.of(good))
    assert rows is not None, "the two parsers disagree about what a good row is"
    return rows, bad


def fault(line: bytes) -> str | None:
    """What is wrong with a row, or None: the plain twin of the arithmetic below."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != FIELDS:
        return f"{len(fields)} columns; legal: {FIELDS} (label, {CRITEO_NUM_DENSE} integers, {CRITEO_NUM_SPARSE} ids)"
    for i, field in enumerate(fields):
        seen = field[:40].decode("utf-8", "backslashreplace")
        if i <= CRITEO_NUM_DENSE:
            if not _INT.fullmatch(field) or int(field or 0) not in _INT32:
                return f"column {i + 1} is {seen!r}; legal: a 32-bit integer or nothing"
            if i == 0 and int(field or 0) not in (0, 1):
                return f"column 1, the label, is {seen!r}; legal: 0 or 1"
        elif not _HEX.fullmatch(field):
            return f"column {i + 1} is {seen!r}; legal: up to 8 hexadecimal digits or nothing"
    return None


def _joined(
    first: tuple[Rows, list[BadRow]], second: tuple[Rows, list[BadRow]], lines: int
) -> tuple[Rows, list[BadRow]]:
    (one, bad_one), (two, bad_two) = first, second
    rows = Rows(
        np.concatenate([one.labels, two.labels]),
        np.concatenate([one.dense, two.dense]),
        np.concatenate([one.sparse, two.sparse], axis=1),
    )
    return rows, bad_one + [BadRow(lines + bad.number, bad.reason) for bad in bad_two]


def _parse_all(text: Text) -> Rows | None:
    """All rows, or None where any of them is in the wrong."""
    characters = text.characters
    separators = np.flatnonzero(characters < _SPACE)  # tabs, newlines, and what no good row has
    count = separators.size // FIELDS
    if separators.size % FIELDS or np.count_nonzero(characters == _TAB) != count * (FIELDS - 1):
        return None
    ends = separators.reshape(count, FIELDS)
    if (characters[ends[:, -1]] != _NEWLINE).any():  # with the two counts: all others are tabs
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
    """(FIELDS + 1, N): the separators of each row, and first the one before it; `before` is the first row's."""
    edges = np.empty((FIELDS + 1, ends.shape[0]), np.int64)
    edges[1:] = ends.T
    edges[0, 1:] = ends[:-1, -1]
    edges[0, 0] = before
    return edges


def _words_from(words: Words, starts: Positions) -> Words:
    """The eight bytes from each position on, out of the two aligned words that hold them: numpy's gather of unaligned
    words is four times slower."""
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
    """The fields as decimal numbers; None where one is not a 32-bit integer. Overwrites `words` and `lengths`."""
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
        return None  # a byte that is above 9 without 6 or with it
    # Neighbours become one number, in three steps: 8 digits, 4 pairs, 2 fours, 1 eight. The first digit is the lowest
    # byte; a multiplication adds it, times ten, to the next one.
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
    """The fields as hexadecimal numbers; None where one has more than eight digits or other characters. Overwrites
    `words`."""
    if lengths.max(initial=0) > 8:
        return None
    _to_digits(words, lengths)
    letters = words >> _SIX
    letters &= _ONES
    spare = np.empty_like(words)
    np.multiply(letters.view(np.uint16), _LETTER, out=spare.view(np.uint16))
    words -= spare  # digits are 0 .. 9 now, letters 10 .. 15, capital ones 32 more
    np.add(words, _SIXES, out=spare)
    spare >>= _FOUR
    spare ^= letters
    seen = np.bitwise_or.reduce(words, axis=None)
    if np.bitwise_or.reduce(spare, axis=None) & _ONES or seen & _UPPER_HALVES & ~_UPPER_CASE:
        return None  # 10 or more without being a letter, a letter below 10, or a character of another kind
    if seen & _UPPER_CASE:
        words &= _NIBBLES
    pairs = words.view(np.uint16)
    pairs *= np.uint16((16 << 8) + 1)
    pairs >>= np.uint16(8)
    return pairs.astype(np.uint8).view(">u4").astype(np.uint32)


def _to_digits(words: Words, lengths: Positions) -> None:
    """Each field moves to the upper end of its word, with zeros below, and "0" becomes 0."""
    bits = np.subtract(64, lengths << 3).view(np.uint64)  # a shift by all 64 bits gives 0
    words <<= bits
    words ^= _ZERO_DIGITS << bits
