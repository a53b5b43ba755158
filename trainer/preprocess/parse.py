"""Criteo's tab-separated text to numbers, all fields of a block of rows at once.

No CSV library has a parser for hexadecimal, and reading 26 columns as strings first costs more than all of this. A
field of at most eight characters is one 64-bit word, so its digits are checked and combined by arithmetic on that word
("SWAR"); what a chunk holds beyond that (long numbers, malformed rows) goes through plain code.

Shapes: N rows, 13 integers and 26 hexadecimal ids per row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.config import CRITEO_NUM_DENSE, CRITEO_NUM_SPARSE

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
FIELDS = 1 + CRITEO_NUM_DENSE + CRITEO_NUM_SPARSE
_TAB, _NEWLINE, _MINUS = 9, 10, 45
_BLOCK_ROWS = 2_048  # the arrays in between stay in the second-level cache
_FEW_ROWS = 64  # below this a chunk with a bad row is looked at row by row, above it is halved
_INT = re.compile(rb"(-?[0-9]{1,10})?")
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")
_INT32 = range(-(2**31), 2**31)


def _every_byte(value: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([value]) * 8, "little"))


_HIGH, _NIBBLES, _ONES = _every_byte(0x80), _every_byte(0x0F), _every_byte(1)
_ALL, _THREE = np.uint64(2**64 - 1), np.uint64(3)
_CASE, _SIX, _NINE = _every_byte(ord("a") - ord("A")), np.uint64(6), np.uint64(9)
# Added to a byte below 128, these set its high bit where it is at least "0", above "9", at least "a", above "f".
_FROM_0, _ABOVE_9 = _every_byte(0x80 - ord("0")), _every_byte(0x7F - ord("9"))
_FROM_A, _ABOVE_F = _every_byte(0x80 - ord("a")), _every_byte(0x7F - ord("f"))
# Neighbours become one number, in three steps: 8 digits, 4 pairs, 2 fours, 1 eight. The first digit is the lowest byte.
_PAIRS = [
    (np.uint64(10), np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(100), np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(10_000), np.uint64(32), np.uint64(0xFFFFFFFF)),
]
_HALVES = [
    (np.uint64(4), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(8), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(16), np.uint64(0xFFFFFFFF)),
]


@dataclass(frozen=True)
class Rows:
    """Parsed rows: `labels` (N,), `dense` (N, 13), both int32 with 0 for what is missing, `sparse` (26, N) uint32."""

    labels: npt.NDArray[np.int32]
    dense: npt.NDArray[np.int32]
    sparse: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class BadRow:
    """A row that is none: which one of its chunk, counted from 0, and why."""

    number: int
    reason: str


def parse(text: bytes) -> tuple[Rows, list[BadRow]]:
    """Rows of a text that ends in a newline; those in the wrong are left out and returned beside the good ones."""
    rows = _parse_all(text)
    if rows is not None:
        return rows, []
    count = text.count(b"\n")
    if count > _FEW_ROWS:
        middle = text.index(b"\n", len(text) // 2) + 1
        if middle == len(text):
            middle = text.rindex(b"\n", 0, len(text) - 1) + 1
        return _joined(parse(text[:middle]), parse(text[middle:]), text.count(b"\n", 0, middle))
    bad = [BadRow(i, reason) for i, line in enumerate(text.split(b"\n")[:-1]) if (reason := fault(line))]
    numbers = {row.number for row in bad}
    good = b"".join(line + b"\n" for i, line in enumerate(text.split(b"\n")[:-1]) if i not in numbers)
    rows = _parse_all(good)
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


def _parse_all(text: bytes) -> Rows | None:
    """All rows, or None where any of them is in the wrong."""
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    buffer = np.frombuffer(b"00000000" + text, dtype=np.uint8)  # so that there are eight bytes before every end
    separators = np.flatnonzero(buffer < 14)  # tabs, newlines, and what no good row has
    count = separators.size // FIELDS
    if separators.size % FIELDS or np.count_nonzero(buffer == _TAB) != count * (FIELDS - 1):
        return None
    ends = separators.reshape(count, FIELDS)
    if (buffer[ends[:, -1]] != _NEWLINE).any() or text.count(b"\n") != count:
        return None
    rows = Rows(
        np.empty(count, np.int32),
        np.empty((count, CRITEO_NUM_DENSE), np.int32),
        np.empty((CRITEO_NUM_SPARSE, count), np.uint32),
    )
    lengths = np.diff(separators, prepend=7).reshape(count, FIELDS) - 1
    words = np.ndarray((max(buffer.size - 7, 0),), dtype="<u8", buffer=buffer, strides=(1,))
    split = 1 + CRITEO_NUM_DENSE
    for at in range(0, count, _BLOCK_ROWS):
        part = slice(at, at + _BLOCK_ROWS)
        numbers = _integers(buffer, words, ends[part, :split], lengths[part, :split])
        ids = _hexadecimals(words, ends[part, split:], lengths[part, split:])
        if numbers is None or ids is None:
            return None
        rows.labels[part], rows.dense[part], rows.sparse[:, part] = numbers[:, 0], numbers[:, 1:], ids.T
    return None if ((rows.labels & ~1) != 0).any() else rows


def _integers(
    buffer: npt.NDArray[np.uint8], words: Words, ends: Positions, lengths: Positions
) -> npt.NDArray[np.int64] | None:
    """The fields as decimal numbers; None where one is not a 32-bit integer."""
    word, spare = _own_bytes(words, ends, np.minimum(lengths, 8))
    spare |= _digits(word)
    spare &= _HIGH
    odd = np.nonzero(spare != _HIGH)
    if odd[0].size:  # a sign is the only other character that a number may have
        starts, lengths_odd = (ends - lengths)[odd], lengths[odd] - 1
        unsigned, flags = _own_bytes(words, ends[odd], np.minimum(lengths_odd, 8))
        if (buffer[starts] != _MINUS).any() or not lengths_odd.all() or not _all(flags | _digits(unsigned)):
            return None
        word[odd] = unsigned
    word &= _NIBBLES
    for factor, shift, mask in _PAIRS:
        np.right_shift(word, shift, out=spare)
        word *= factor
        word += spare
        word &= mask
    numbers = word.view(np.int64)
    numbers[odd] *= -1
    for i in np.argwhere(lengths > 8):
        field = buffer[ends[*i] - lengths[*i] : ends[*i]].tobytes()
        if not _INT.fullmatch(field) or int(field) not in _INT32:
            return None
        numbers[*i] = int(field)
    return numbers


def _hexadecimals(words: Words, ends: Positions, lengths: Positions) -> Words | None:
    """The fields as hexadecimal numbers; None where one has more than eight digits or other characters."""
    if lengths.max(initial=0) > 8:
        return None
    word, flags = _own_bytes(words, ends, lengths)
    flags |= _digits(word)
    spare = word | _CASE
    letters = spare + _FROM_A
    spare += _ABOVE_F
    np.invert(spare, out=spare)
    letters &= spare
    flags |= letters
    if not _all(flags) or np.bitwise_or.reduce(word, axis=None) & _HIGH:
        return None
    np.right_shift(word, _SIX, out=spare)
    spare &= _ONES
    spare *= _NINE
    word &= _NIBBLES
    word += spare
    for shift, mask in _HALVES:
        np.right_shift(word, shift + shift, out=spare)
        word <<= shift
        word |= spare
        word &= mask
    return word


def _own_bytes(words: Words, ends: Positions, lengths: Positions) -> tuple[Words, Words]:
    """Each field at the upper end of a word with zeros below, and the bits that are not the field's own."""
    word = words[ends - 8]
    bits = lengths.view(np.uint64) << _THREE
    others = np.right_shift(_ALL, bits, out=bits)  # a shift by all 64 bits gives 0
    np.bitwise_and(word, ~others, out=word)
    return word, others


def _digits(word: Words) -> Words:
    """The high bit of each byte that is an ASCII digit (in words whose bytes are all below 128)."""
    flags = word + _FROM_0
    beyond = word + _ABOVE_9
    beyond |= word
    np.invert(beyond, out=beyond)
    flags &= beyond
    return flags


def _all(flags: Words) -> bool:
    """Whether the high bit of every byte is set."""
    return bool((np.bitwise_and.reduce(flags, axis=None) & _HIGH) == _HIGH)
