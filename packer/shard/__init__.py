"""The shard format, version 1: schema, encode, decode, validate. Needs numpy and pyarrow alone.

A shard is an Arrow IPC *file*. Each pack (row) is a record batch of its own, its body compressed
with LZ4, so that a rank's stream is the schema message followed by byte ranges of shard files in any
order: the server decodes and encodes nothing (docs/shard-format.md draws the layout).

Each record batch carries one custom metadata value, the *stamp*: fixed-width text that holds the
checksum and length of the message and room for what only the stream knows (epoch, step, trained
tokens of the step over all ranks). At rest that room is zero; serving overwrites it in place, which
moves no byte. The checksum is taken with the room and itself zeroed, so it holds before and after.

Errors: ShardError (a ValueError) for bytes that break a rule of the format.
"""

from packer.shard.decode import (
    decode_batch,
    decode_message,
    decode_pack,
    iter_boundaries,
    iter_messages,
    open_shard,
    read_packs,
    validate,
)
from packer.shard.encode import END_OF_STREAM, encode_message, encode_packs, encode_shard, schema_message
from packer.shard.layout import (
    FORMAT_VERSION,
    IGNORE_INDEX,
    PADDING_ID,
    ROW_INDEX,
    Pack,
    Packs,
    ShardError,
    check,
    labels,
    padding_pack,
    position_ids,
    schema,
)
from packer.shard.stamp import (
    Stamp,
    check_message,
    locate_stamp,
    read_stamp,
    stamp_all,
    stamp_text,
    stamp_texts,
    stamped,
    verify_message,
)

__all__ = [
    "END_OF_STREAM",
    "FORMAT_VERSION",
    "IGNORE_INDEX",
    "PADDING_ID",
    "ROW_INDEX",
    "Pack",
    "Packs",
    "ShardError",
    "Stamp",
    "check",
    "check_message",
    "decode_batch",
    "decode_message",
    "decode_pack",
    "encode_message",
    "encode_packs",
    "encode_shard",
    "iter_boundaries",
    "iter_messages",
    "labels",
    "locate_stamp",
    "open_shard",
    "padding_pack",
    "position_ids",
    "read_packs",
    "read_stamp",
    "schema",
    "schema_message",
    "stamp_all",
    "stamp_text",
    "stamp_texts",
    "stamped",
    "validate",
    "verify_message",
]
