"""CRC-32: the package isal gives the numbers that zlib gives."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.shard import checksum

isal_zlib = pytest.importorskip("isal.isal_zlib")


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(1, 200))
def test_isal_and_zlib_give_the_same(data: bytes, value: int, start: int, repeat: int) -> None:
    view = memoryview(bytearray(data * repeat))[start:]
    assert isal_zlib.crc32(view, value) == zlib.crc32(view, value)
    assert isal_zlib.crc32(view) == zlib.crc32(view)


def test_isal_is_used_where_it_is_installed() -> None:
    assert checksum.crc32 is isal_zlib.crc32
