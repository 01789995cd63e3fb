"""The stamp: fixed-width text in the header of every record batch message; checksum and length.

The checksum is that of the whole message at rest, its own digits zeroed, XORed with `_said`: what the CRC-32
of the other numbers differs by from that of zeros. At rest that is 0. So a server that writes the numbers of
a stream into a message need not read its body to keep the checksum true of every byte.
"""

from __future__ import annotations

import re
import struct
from binascii import hexlify, unhexlify
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.shard.checksum import crc32
from packer.shard.layout import ShardError

STAMP_KEY = b"padfree.stamp"
_STAMP_MARK = b"padfree1 crc32="
_ROOM_FORMAT = b"epoch=%08d step=%012d items=%012d done=%d"
_STAMP_FORMAT = b"padfree1 crc32=%08x body=%012d " + _ROOM_FORMAT + b" pad=%d"
_STAMP_LENGTH = len(_STAMP_FORMAT % (0, 0, 0, 0, 0, 0, 0))
_ROOM_LENGTH = len(_ROOM_FORMAT % (0, 0, 0, 0))
_CRC_AT, _CRC_LENGTH = len(_STAMP_MARK), 8  # from the start of the stamp
_ROOM_AT = _STAMP_LENGTH - _ROOM_LENGTH - len(b" pad=0")  # from the start of the stamp
_AT_REST = _ROOM_FORMAT % (0, 0, 0, 0)
_REST = crc32(_AT_REST)
_STEP_AT, _ITEMS_AT, _NUMBER_DIGITS = _AT_REST.index(b"step=") + 5, _AT_REST.index(b"items=") + 6, 12
_THREE_DIGITS = np.frombuffer(b"".join(b"%03d" % number for number in range(1000)), np.uint8).reshape(-1, 3)
# The stamp from its start to the end of the room: mark, checksum, what stays, room.
_READ = struct.Struct(f"{_CRC_AT}s {_CRC_LENGTH}s {_ROOM_AT - _CRC_AT - _CRC_LENGTH}s {_ROOM_LENGTH}s")
_WRITE = struct.Struct(_READ.format.partition(" ")[2])  # the same without the mark
_NO_CRC = b"0" * _CRC_LENGTH
_SEAL = struct.Struct(f"{_CRC_AT}x {_CRC_LENGTH}s 6x 12s").unpack_from  # checksum and length
_last_at = 0  # where the stamp lay in the last header: headers look alike, and threads may share it
_PATTERN = re.compile(
    rb"padfree1 crc32=([0-9a-f]{8}) body=(\d{12}) "
    rb"epoch=(\d{8}) step=(\d{12}) items=(\d{12}) done=([01]) pad=([01])"
)


class Stamp(NamedTuple):
    """What a record batch message says of itself. At rest all but the first two are zero."""

    crc32: int = 0
    body_bytes: int = 0
    epoch: int = 0
    step: int = 0
    num_items: int = 0  # trained tokens of the whole optimiser step, over all ranks
    step_done: bool = False  # last micro-batch of its optimiser step
    padding: bool = False  # fills up a short last step

    def encode(self) -> bytes:
        return _STAMP_FORMAT % (
            self.crc32,
            self.body_bytes,
            self.epoch,
            self.step,
            self.num_items,
            self.step_done,
            self.padding,
        )


def _find_stamp(header: bytes | bytearray | memoryview) -> int:
    at = bytes(header).find(_STAMP_MARK)
    if at < 0 or at + _STAMP_LENGTH > len(header):
        raise ShardError("the record batch carries no padfree stamp: not written by padfree, or damaged")
    return at


def read_stamp(header: bytes | bytearray | memoryview) -> Stamp:
    """The stamp of a message, from its header (prefix and metadata)."""
    return locate_stamp(header)[0]


def locate_stamp(header: bytes | bytearray | memoryview) -> tuple[Stamp, int]:
    """The stamp of a message and where it lies in the header."""
    global _last_at
    found = _PATTERN.match(header, _last_at) or _PATTERN.search(header)
    if found is None:
        at = _find_stamp(header)
        text = bytes(header[at : at + _STAMP_LENGTH])
        raise ShardError(f"the stamp of a record batch is damaged: {text!r}")
    crc32, body_bytes, epoch, step, num_items, done, padding = found.groups()
    numbers = int(crc32, 16), int(body_bytes), int(epoch), int(step), int(num_items)
    stamp = Stamp(*numbers, done == b"1", padding == b"1")
    _last_at = found.start()
    return stamp, _last_at


def _said(text: bytes) -> int:
    """What the numbers of a stream, as text of the room, change in the checksum."""
    return crc32(text) ^ _REST


def _room(stamp: Stamp) -> bytes:
    return _ROOM_FORMAT % (stamp.epoch, stamp.step, stamp.num_items, stamp.step_done)


def stamped(header: bytes | memoryview, *, epoch: int, step: int, num_items: int, step_done: bool) -> bytes:
    """The header of a message at rest, as it goes out in a stream."""
    at = _find_stamp(header)
    rest = read_stamp(header)
    text = stamp_text(epoch=epoch, step=step, num_items=num_items, step_done=step_done)
    stamp = Stamp(
        crc32=rest.crc32 ^ _said(_room(rest)) ^ _said(text),
        body_bytes=rest.body_bytes,
        epoch=epoch,
        step=step,
        num_items=num_items,
        step_done=step_done,
        padding=rest.padding,
    )
    return b"".join((header[:at], stamp.encode(), header[at + _STAMP_LENGTH :]))


def stamp_text(*, epoch: int, step: int, num_items: int, step_done: bool) -> bytes:
    """What the stamp of a message that goes out says beside its checksum and length: for `stamp_all`.

    Raises ShardError for numbers that have no room.
    """
    text = _ROOM_FORMAT % (epoch, step, num_items, step_done)
    if len(text) != _ROOM_LENGTH or min(epoch, step, num_items) < 0:
        raise ShardError(f"a stamp has no room for epoch {epoch}, step {step}, {num_items} items")
    return text


def stamp_texts(
    *, epoch: int, step: NDArray[np.int64], num_items: NDArray[np.int64], step_done: NDArray[np.bool_]
) -> list[bytes]:
    """`stamp_text` for many messages of an epoch, (k,) each, all at once."""
    outside = (np.minimum(step, num_items) < 0) | (np.maximum(step, num_items) >= 10**_NUMBER_DIGITS)
    for one in np.flatnonzero(outside)[:1]:
        stamp_text(epoch=epoch, step=int(step[one]), num_items=int(num_items[one]), step_done=True)
    first = np.frombuffer(stamp_text(epoch=epoch, step=0, num_items=0, step_done=False), np.uint8)
    texts = np.tile(first, (len(step), 1))
    for at, numbers in ((_STEP_AT, step), (_ITEMS_AT, num_items)):
        left = numbers
        for column in range(at + _NUMBER_DIGITS - 3, at - 3, -3):
            left, three = np.divmod(left, 1000)
            texts[:, column : column + 3] = _THREE_DIGITS[three]
            if not left.any():  # zeros are there already
                break
    texts[:, -1] += step_done
    whole = texts.tobytes()
    return [whole[at : at + _ROOM_LENGTH] for at in range(0, len(whole), _ROOM_LENGTH)]


def stamp_all(data: memoryview, starts: Sequence[int], texts: Sequence[bytes]) -> None:
    """Turn messages at rest into those that go out, as `stamped`, in their own bytes. The server does this to
    every pack it sends: twenty times as fast, for it does not search every header.

    starts: where each message begins. texts: of `stamp_text`, one each. Raises ShardError.
    """
    read, write, num_bytes = _READ.unpack_from, _WRITE.pack_into, len(data)
    hint = 0
    for start, text in zip(starts, texts, strict=True):
        at = start + hint
        fits = at + _STAMP_LENGTH <= num_bytes
        mark, crc, stays, room = read(data, at) if fits else (b"", b"", b"", b"")
        if mark != _STAMP_MARK:  # headers look alike, but not all
            header_bytes = 8 + int.from_bytes(data[start + 4 : start + 8], "little")
            hint = _find_stamp(data[start : start + header_bytes])
            at = start + hint
            _, crc, stays, room = read(data, at)
        # A damaged room counts as it is: who receives the message finds that its checksum is wrong.
        before = _REST if room == _AT_REST else crc32(room)
        try:
            sealed = int.from_bytes(unhexlify(crc), "big")
        except ValueError as error:
            raise ShardError(f"the stamp of a record batch is damaged: its crc32 is {crc!r}") from error
        changed = sealed ^ before ^ crc32(text)
        write(data, at + _CRC_AT, hexlify(changed.to_bytes(4, "big")), stays, text)


def _checksum(message: memoryview, at: int) -> int:
    """What the crc32 of the stamp at `at` must be: of the message at rest, and what its numbers change."""
    room_at, room_end = at + _ROOM_AT, at + _ROOM_AT + _ROOM_LENGTH
    crc = crc32(_NO_CRC, crc32(message[: at + _CRC_AT]))
    crc = crc32(message[at + _CRC_AT + _CRC_LENGTH : room_at], crc)
    crc = crc32(message[room_end:], crc32(_AT_REST, crc))
    return crc ^ crc32(message[room_at:room_end]) ^ _REST


def verify_message(
    message: bytes | bytearray | memoryview, header_bytes: int, *, located: tuple[Stamp, int] | None = None
) -> Stamp:
    """Check length and checksum of a whole message; return its stamp. Raises ShardError.

    located: what `locate_stamp` found in its header, where that is known.
    """
    view = memoryview(message)
    stamp, at = located or locate_stamp(view[:header_bytes])
    if len(view) != header_bytes + stamp.body_bytes:
        raise ShardError(
            f"a record batch needs {header_bytes + stamp.body_bytes} bytes, {len(view)} are there: cut off"
        )
    found = _checksum(view, at)
    if found != stamp.crc32:
        raise ShardError(f"checksum of a record batch is {found:08x}, its stamp says {stamp.crc32:08x}")
    return stamp


def check_message(message: memoryview, header_bytes: int) -> None:
    """`verify_message` for who needs no numbers of the stamp, in a fifth of the time."""
    at = _last_at
    if message[at : at + _CRC_AT] != _STAMP_MARK:
        at = locate_stamp(message[:header_bytes])[1]
    crc, num_bytes = _SEAL(message, at)
    if num_bytes != b"%012d" % (len(message) - header_bytes) or crc != b"%08x" % _checksum(message, at):
        verify_message(message, header_bytes)  # says what is wrong
        raise ShardError(f"the stamp of a record batch is damaged: {crc!r}, {num_bytes!r}")


def seal(message: memoryview, stamp_of: Stamp) -> int:
    """Write checksum and length into the stamp of a fresh message, in place. Returns its header's bytes."""
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    at = _find_stamp(message[:header_bytes])
    stamp = stamp_of._replace(body_bytes=len(message) - header_bytes)
    message[at : at + _STAMP_LENGTH] = stamp.encode()
    message[at : at + _STAMP_LENGTH] = stamp._replace(crc32=_checksum(message, at)).encode()
    return header_bytes


def seal_at(message: memoryview, at: int) -> None:
    """As `seal`, of a message whose stamp lies at `at` and holds its length already, and zeros else."""
    message[at + _CRC_AT : at + _CRC_AT + _CRC_LENGTH] = b"%08x" % crc32(message)
