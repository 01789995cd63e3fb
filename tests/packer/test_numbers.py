"""Numbers that are parsed many at once are those that JSON says, or none."""

from __future__ import annotations

import json

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packer.sources import numbers
from packer.sources.numbers import NumberParser

number = st.one_of(st.integers(0, 9), st.integers(-999, 151_000), st.integers(-99_999_999, 99_999_999))
lists = st.lists(st.lists(number, max_size=8), min_size=1, max_size=8)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> object:
    """Pieces of text so small that a few numbers fill several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "_PIECE_BYTES", 24)
        yield


@given(lists, st.sampled_from([",", ", "]))
@example([[]], ",")
@example([[], [1], []], ", ")
@example([[-99_999_999, 99_999_999, 0, -1]], ", ")
def test_numbers_and_how_many_each_has(given: list[list[int]], comma: str) -> None:
    bodies = [json.dumps(one, separators=(comma, ":"))[1:-1].encode() for one in given]
    found = NumberParser().parse(bodies)
    assert found is not None
    assert found[0].dtype == np.int32
    assert found[0].tolist() == [value for one in given for value in one]
    assert found[1].tolist() == list(map(len, given))


# Longer than a piece, and numbers of every width before and behind a fault.
@given(st.lists(number, min_size=1, max_size=12), st.sampled_from([b",", b", "]), st.data())
def test_whatever_is_no_number_is_not_taken_for_one(
    given: list[int], comma: bytes, data: st.DataObject
) -> None:
    body = comma.join(str(value).encode() for value in given)
    at = data.draw(st.integers(0, len(body)))
    put = data.draw(
        st.sampled_from([b"-", b"0", b" ", b",", b".", b"e", b"\n", b"+", b"9" * 9, b":", b"/", b"\xff"])
    )
    body = body[:at] + put + body[at + data.draw(st.integers(0, 2)) :]
    found = NumberParser().parse([b"1", body, b"2"])
    if found is not None:
        inner = orjson.loads(b"[" + body + b"]")
        assert found[0].tolist() == [1, *inner, 2]
        assert all(type(value) is int for value in inner)


@pytest.mark.parametrize(
    "wrong", [b"007", b"-", b"--1", b"1-", b"-07", b"123456789", b"1.5", b"1 2", b"1,,2"]
)
@pytest.mark.parametrize("comma", [b",", b", "])
def test_faults_wherever_they_stand(wrong: bytes, comma: bytes) -> None:
    parser = NumberParser()
    for bodies in ([wrong], [b"", wrong], [comma.join([b"1", wrong])], [comma.join([b"-5", wrong, b"10"])]):
        assert parser.parse(bodies) is None
        assert parser.parse([comma.join([b"4", b"-0", b"-5"])])[0].tolist() == [4, 0, -5]  # type: ignore[index]


def test_both_kinds_of_commas_are_not_taken() -> None:
    assert NumberParser().parse([b"1, 2", b"3,4"]) is None
    assert NumberParser().parse([b"1,2", b"3, 4"]) is None
