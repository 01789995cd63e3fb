"""Texts of whole numbers ("1, 2, 3") to flat arrays: each step takes one character of many numbers at once.

A step on bytes costs a fortieth of a nanosecond a character, so what can be done there is: of the 6
characters that a token's id takes, finding the commas costs as much as all the digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_SPACE, _COMMA, _MINUS, _ZERO, _TEN = (np.uint8(ord(c)) for c in " ,-0\n")
_MAX_DIGITS = 8
_FRONT = _MAX_DIGITS  # characters before a piece of text that are looked at with it
# The least number of so many digits that has no zero in front.
_LEAST = np.array([0, 0, *(10**n for n in range(1, _MAX_DIGITS))], np.int32)
_PIECE_BYTES = 192 << 10  # of text at a time: what the steps hand on stays in the core's cache


class NumberParser:
    """Holds what the steps hand on: memory that is new each time costs more than most of them."""

    def __init__(self) -> None:
        self._characters = np.empty((5, _FRONT + _PIECE_BYTES), np.uint8)
        self._places = np.empty((2, _PIECE_BYTES), np.int64)

    def parse(self, bodies: Sequence[bytes]) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
        """The numbers of all bodies end to end, (N,) int32, and how many each body has.

        A body is what stands between the brackets of a list in JSON. None where one is not whole numbers of
        up to 8 digits, as JSON has them, with a comma and a space between all of them, or a comma alone.
        """
        sizes = np.fromiter(map(len, bodies), np.int64, len(bodies))
        is_filled = sizes > 0
        filled = bodies if is_filled.all() else [body for body in bodies if body]
        if not filled:
            return np.zeros(0, np.int32), sizes
        spaced = next((b", " in body for body in filled if b"," in body), False)
        mark = b", " if spaced else b","
        # _FRONT commas, then all numbers: each ends with a comma, and begins with a space where they are so.
        text = mark.join((b"," * (_FRONT - 1), *filled, b""))
        size = len(text) - spaced
        # Where the comma behind each body is.
        borders = np.cumsum(sizes[is_filled] + len(mark)) + (_FRONT - 1)
        values = np.empty(size // (1 + len(mark)), np.int32)  # room for the shortest numbers
        data, signed = np.frombuffer(text, np.uint8), b"-" in text
        counts, count, start = [], 0, _FRONT
        while start < size:
            stop = text.rfind(b",", start, start + _PIECE_BYTES) + 1
            if not stop:  # something far too long
                return None
            ends = self._piece(data[start - _FRONT : stop], spaced, signed, values[count:])
            if ends is None:
                return None
            low, high = np.searchsorted(borders, (start, stop))
            counts.append(count + 1 + np.searchsorted(ends, borders[low:high] - start))
            count, start = count + len(ends), stop
        lengths = np.zeros(len(bodies), np.int64)
        lengths[is_filled] = np.diff(np.concatenate(counts), prepend=0)
        return values[:count], lengths

    def _piece(
        self, text: Bytes, spaced: bool, signed: bool, values: NDArray[np.int32]
    ) -> NDArray[np.int64] | None:
        """Put the numbers of `text` at the beginning of `values`; where their commas are, or None.

        _FRONT characters are those before the piece; places are from behind them.
        """
        value, is_digit, is_comma, spare, tens = self._characters[:, : len(text)]
        np.subtract(text, _ZERO, out=value)
        np.less(value, _TEN, out=is_digit.view(np.bool_))
        np.equal(text, _COMMA, out=is_comma.view(np.bool_))
        ends = np.flatnonzero(is_comma[_FRONT:].view(np.bool_))
        begins, widths = self._places[:, : len(ends)]
        begins[0] = 0
        np.add(ends[:-1], 1, out=begins[1:])
        np.subtract(ends, begins, out=widths)
        if widths.max() > _MAX_DIGITS + 2 or widths.min() < 1 + spaced:
            return None
        digits = widths.astype(np.uint8)
        others = len(ends)  # characters that are no digits
        if spaced:  # behind each comma, and nowhere else
            np.equal(text, _SPACE, out=spare.view(np.bool_))
            if (spare[_FRONT:] != is_comma[_FRONT - 1 : -1]).any():
                return None
            others += len(ends)
            digits -= 1
        minus = None
        if signed:  # where a number begins, and nowhere else
            np.equal(text, _MINUS, out=spare.view(np.bool_))
            minus = spare[_FRONT + spaced :].take(begins)
            num_minus = int(np.count_nonzero(minus))
            if np.count_nonzero(spare[_FRONT:]) != num_minus:
                return None
            others += num_minus
            digits -= minus
        longest = int(digits.max())
        if (
            np.count_nonzero(is_digit[_FRONT:]) + others != len(text) - _FRONT
            or longest > _MAX_DIGITS
            or not digits.all()
        ):
            return None
        # Two digits as a number, at the place of the second. What is no digit counts as a zero.
        np.multiply(value, is_digit, out=value)
        np.multiply(value, _TEN, out=tens)
        pairs = np.add(value[1:], tens[:-1], out=spare[1:])
        found = values[: len(ends)]
        np.copyto(found, pairs[_FRONT - 2 :].take(ends))
        for behind in range(2, longest, 2):
            higher = pairs[_FRONT - 2 - behind :].take(ends)
            np.multiply(higher, (digits > behind).view(np.uint8), out=higher)  # else of the number before
            found += np.multiply(higher, 10**behind, dtype=np.int32)
        if (found < _LEAST.take(digits)).any():  # 007
            return None
        if minus is not None:
            np.negative(found, out=found, where=minus.view(np.bool_))
        return ends
