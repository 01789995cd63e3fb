"""Conditional requests and byte ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.ranges import Unsatisfiable, is_unchanged, may_send_range, parse_range


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-99", (0, 100)),
        ("bytes=900-", (900, 1000)),
        ("Bytes=900-901", (900, 902)),
        ("bytes=-50", (950, 1000)),
        ("bytes=0-5000", (0, 1000)),
        ("bytes=-5000", (0, 1000)),
        ("bytes=5-5", (5, 6)),
        ("bytes=999-999", (999, 1000)),
        ("bytes=5-4", None),
        ("bytes=abc", None),
        ("bytes=-", None),
        ("bytes=0-1,5-6", None),
        ("packs=0-1", None),
        ("bytes 0-1", None),
        ("bytes=0-" + "9" * 40, None),
        ("bytes=+1-2", None),
        ("bytes=\u0661-\u0662", None),  # digits, but not of HTTP
        ("", None),
        (None, None),
    ],
)
def test_f41_byte_ranges_of_a_shard(header, found):
    assert parse_range(header, 1000) == found


@pytest.mark.parametrize("header", ["bytes=1000-", "bytes=-0", "bytes=1000-1001"])
def test_f41_a_range_that_selects_nothing_is_unsatisfiable(header):
    with pytest.raises(Unsatisfiable):
        parse_range(header, 1000)


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_a_range_selects_what_slicing_selects(size, first, last):
    data = bytes(range(size))
    wanted = data[first : last + 1]
    if last < first:
        assert parse_range(f"bytes={first}-{last}", size) is None
    elif wanted:
        start, stop = parse_range(f"bytes={first}-{last}", size)
        assert data[start:stop] == wanted
    else:
        with pytest.raises(Unsatisfiable):
            parse_range(f"bytes={first}-{last}", size)


def test_f42_a_range_needs_the_same_strong_validator():
    assert may_send_range(None, '"a"')
    assert may_send_range('"a"', '"a"')
    assert not may_send_range('"b"', '"a"')
    assert not may_send_range('W/"a"', '"a"')
    assert not may_send_range("Wed, 21 Oct 2026 07:28:00 GMT", '"a"')


def test_if_none_match_compares_weakly_and_takes_lists():
    assert is_unchanged('"a"', '"a"')
    assert is_unchanged('"b", W/"a"', '"a"')
    assert is_unchanged("*", '"a"')
    assert not is_unchanged('"b"', '"a"')
    assert not is_unchanged(None, '"a"')
