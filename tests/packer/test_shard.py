"""The shard format: round trips, canonical bytes, the validator of every rule, golden files."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import changed, pack_of, random_packs

from packer import shard
from packer.shard import Pack, ShardError, Stamp, header
from packer.shard.decode import validate_row
from packer.shard.encode import record_batch
from packer.shard.layout import Bits

GOLDEN = Path(__file__).parent.parent / "golden"


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    total = sum(lengths)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    mask = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)), np.bool_)
    mask[cu_seqlens[:-1]] = False
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))
    examples = draw(st.lists(st.integers(0, 2**40), min_size=len(lengths), max_size=len(lengths)))
    return Pack(
        input_ids=np.array(ids, np.int32),
        loss_mask=mask,
        cu_seqlens=cu_seqlens,
        example_ids=np.array(examples, np.int64),
    )


@given(st.lists(packs(), min_size=1, max_size=5))
def test_decode_of_encode_is_the_same_and_valid(many: list[Pack]) -> None:
    data, index = shard.encode_shard(many, "d" * 32)
    assert list(shard.read_packs(data)) == many
    assert shard.validate(data, dataset="d" * 32, max_tokens=max(p.num_tokens for p in many)) == len(many)
    assert index["num_tokens"].tolist() == [p.num_tokens for p in many]
    assert index["num_trained"].tolist() == [p.num_trained for p in many]
    assert index["sum_squares"].tolist() == [
        int((np.diff(p.cu_seqlens).astype(int) ** 2).sum()) for p in many
    ]
    spans = [(int(r["offset"]), int(r["header_bytes"]), int(r["body_bytes"])) for r in index]
    assert spans == list(shard.iter_messages(data))


def test_equal_packs_give_equal_bytes_whatever_arrays_they_are_views_of() -> None:
    many = random_packs(5)
    padded = [np.concatenate([[7], p.input_ids, [7]]).astype(np.int32) for p in many]
    views = [changed(p, input_ids=q[1:-1]) for p, q in zip(many, padded, strict=True)]
    assert bytes(shard.encode_shard(many, "x")[0]) == bytes(shard.encode_shard(views, "x")[0])


def test_positions_restart_and_labels_are_ids_where_trained() -> None:
    pack = pack_of([[5, 6, 7], [8], [9, 9]], [0, 1, 2])
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert pack.labels.tolist() == [-100, 6, 7, -100, -100, 9]
    assert (pack.max_seqlen, pack.num_trained) == (3, 3)


def test_any_arrow_reader_reads_a_shard_with_the_types_of_the_contract() -> None:
    data, _ = shard.encode_shard(random_packs(3), "abc")
    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    assert {field.name: str(field.type) for field in table.schema} == {
        "input_ids": "list<item: int32>",
        "position_ids": "list<item: int32>",
        "loss_mask": "list<item: bool>",
        "cu_seqlens": "list<item: int32>",
        "max_seqlen": "int32",
        "example_ids": "list<item: int64>",
    }
    assert table.schema.metadata == {b"padfree.format_version": b"1", b"padfree.dataset": b"abc"}
    assert table.num_rows == 3


def test_f26_all_shards_have_one_schema() -> None:
    groups = [random_packs(4), [pack_of([[1, 2]], [0])] * 3, [pack_of([[1]], [9])]]
    tables = [pa.ipc.open_file(pa.py_buffer(shard.encode_shard(g, "d")[0])).read_all() for g in groups]
    assert all(t.schema.equals(tables[0].schema, check_metadata=True) for t in tables)
    assert pa.concat_tables(tables, promote_options="none").num_rows == 8


# ------------------------------------------------------------------ rules


def _broken(**changes: object) -> Pack:
    return changed(pack_of([[5, 6, 7], [8, 9]], [0, 1]), **changes)


@pytest.mark.parametrize(
    ("pack", "says"),
    [
        (_broken(cu_seqlens=np.array([0, 3, 3, 5], np.int32), example_ids=np.arange(3)), "strictly increase"),
        (_broken(cu_seqlens=np.array([0, 3, 4], np.int32)), "end at num_tokens=5"),
        (_broken(cu_seqlens=np.array([1, 3, 5], np.int32)), "start at 0"),
        (_broken(cu_seqlens=np.array([], np.int32)), "start at 0"),
        (_broken(loss_mask=np.ones(5, np.bool_)), "first token"),
        (_broken(loss_mask=np.ones(4, np.bool_)), "4 values for 5"),
        (_broken(example_ids=np.array([0, -1])), "padding"),
        (_broken(example_ids=np.array([0])), "1 example_ids for 2"),
        (_broken(input_ids=np.array([5, -6, 7, 8, 9], np.int32)), "negative"),
    ],
)
def test_a_pack_that_breaks_a_rule_is_not_written(pack: Pack, says: str) -> None:
    with pytest.raises(ShardError, match=says):
        shard.encode_shard([pack], "d")


def test_validate_finds_every_flipped_byte_of_a_pack() -> None:
    data, index = shard.encode_shard(random_packs(2), "d")
    first, end = int(index["offset"][0]), len(data)
    clean = bytes(data)
    for at in range(first, end, 7):
        damaged = bytearray(clean)
        damaged[at] ^= 0x40
        last = index[-1]
        in_packs = at < int(last["offset"] + last["header_bytes"] + last["body_bytes"])
        if in_packs:
            with pytest.raises(ShardError):
                shard.validate(bytes(damaged))


@pytest.mark.parametrize("keep", [0, 3, 100, 600, 1500, -1])
def test_a_file_that_is_cut_off_is_told(keep: int) -> None:
    data, _ = shard.encode_shard(random_packs(2), "d")
    with pytest.raises(ShardError):
        shard.validate(bytes(data)[:keep])


def test_stored_positions_and_max_seqlen_are_checked_against_the_boundaries() -> None:
    pack = pack_of([[5, 6, 7], [8, 9]], [0, 1])
    batch = record_batch([pack], shard.schema("d"))
    for name, value in (("position_ids", [[0, 1, 2, 3, 4]]), ("max_seqlen", [5])):
        at = batch.schema.get_field_index(name)
        columns = list(batch.columns)
        columns[at] = pa.array(value, batch.schema.field(name).type)
        with pytest.raises(ShardError, match=name):
            validate_row(pa.RecordBatch.from_arrays(columns, schema=batch.schema), None)


def test_validate_names_a_wrong_dataset_version_and_capacity() -> None:
    data, _ = shard.encode_shard([pack_of([[1, 2, 3]], [0])], "d")
    with pytest.raises(ShardError, match="belongs to dataset 'd'"):
        shard.validate(data, dataset="e")
    with pytest.raises(ShardError, match="pack 0: 3 tokens, more than max_tokens=2"):
        shard.validate(data, max_tokens=2)
    sink = pa.BufferOutputStream()
    other = shard.schema("d").with_metadata({"padfree.format_version": "2"})
    with pa.ipc.new_file(sink, other):
        pass
    with pytest.raises(ShardError, match="version 1 wanted, found 2"):
        shard.validate(sink.getvalue())


# ------------------------------------------------------------------ stamps and streams


def test_a_stamped_message_still_verifies_and_decodes() -> None:
    many = random_packs(3)
    data, index = shard.encode_shard(many, "d")
    stream = [shard.schema_message("d")]
    for step, row in enumerate(index):
        at, header, body = int(row["offset"]), int(row["header_bytes"]), int(row["body_bytes"])
        message = shard.stamped(data[at : at + header], epoch=2, step=step, num_items=99, step_done=True)
        message += bytes(data[at + header : at + header + body])
        stamp = shard.verify_message(message, header)
        assert (stamp.epoch, stamp.step, stamp.num_items, stamp.step_done) == (2, step, 99, True)
        assert shard.decode_message(message) == [many[step]]
        stream.append(message)
    stream.append(shard.END_OF_STREAM)
    table = pa.ipc.open_stream(b"".join(stream)).read_all()
    assert table.column("input_ids").to_pylist() == [p.input_ids.tolist() for p in many]


def _message(packs_of_it: list[Pack]) -> tuple[memoryview, int]:
    message = memoryview(shard.encode_message(packs_of_it, stamp=Stamp()))
    return message, 8 + int.from_bytes(message[4:8], "little")


@given(packs())
def test_a_pack_read_by_hand_is_what_arrow_reads(pack: Pack) -> None:
    message, header_bytes = _message([pack])
    own = bytearray(message)
    decoded = shard.decode_pack(memoryview(own), header_bytes)
    own[:] = bytes(len(own))  # no array is a view of the message
    assert [decoded] == shard.decode_message(message) == [pack]
    for name in ("input_ids", "loss_mask", "cu_seqlens", "example_ids"):
        assert getattr(decoded, name).dtype == getattr(pack, name).dtype


def test_an_uncompressed_pack_is_read_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer.shard.encode._write_options", pa.ipc.IpcWriteOptions)
    (pack,) = random_packs(1)
    message, header_bytes = _message([pack])
    own = bytearray(message)
    decoded = shard.decode_pack(memoryview(own), header_bytes)
    own[:] = bytes(len(own))
    assert decoded == pack


def test_what_is_not_one_pack_of_this_format_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardError, match="one pack a record batch is required, found 2"):
        shard.decode_pack(*_message(random_packs(2)))
    message, header_bytes = _message(random_packs(1))
    with pytest.raises(ShardError, match="not a record batch of this format"):
        shard.decode_pack(message[:-100], header_bytes)
    for short in (8, 20, 300):
        with pytest.raises(ShardError, match="not of this format"):
            shard.decode_pack(message[:short], short)
    other = pa.schema([pa.field("a", pa.int32())])
    foreign = memoryview(pa.record_batch([pa.array([1])], other).serialize())
    with pytest.raises(ShardError, match="a list of 11 is required in the header of a record batch, found 1"):
        shard.decode_pack(foreign, 8 + int.from_bytes(foreign[4:8], "little"))
    head = memoryview(shard.schema_message("d"))
    with pytest.raises(ShardError, match="not a record batch"):
        shard.decode_pack(head, len(head))
    zstd = pa.ipc.IpcWriteOptions(compression="zstd")
    monkeypatch.setattr("packer.shard.encode._write_options", lambda: zstd)
    with pytest.raises(ShardError, match=r"LZ4 \(0\) is required, found codec 1"):
        shard.decode_pack(*_message(random_packs(1)))


def test_no_damage_of_a_message_brings_down_who_reads_it() -> None:
    (pack,) = random_packs(1)
    clean, header_bytes = _message([pack])
    for at in range(8, len(clean), 3):
        for bit in (1, 0x80):
            damaged = bytearray(clean)
            damaged[at] ^= bit
            with contextlib.suppress(ShardError):  # what is not found here, the checksum found before
                shard.decode_pack(memoryview(damaged), header_bytes)


def test_a_header_is_read_the_same_whatever_was_read_before() -> None:
    def places(damaged: bytearray, *, before: bytes | None) -> header.Places | None:
        header._last = None
        if before is not None:
            header.read_places(memoryview(before), len(before))
        with contextlib.suppress(ShardError):
            return header.read_places(memoryview(damaged), len(damaged))
        return None

    message, header_bytes = _message(random_packs(1))
    clean = bytes(message[:header_bytes])
    for at in range(8, len(clean)):
        for bit in (1, 4, 0x80):
            damaged = bytearray(clean)
            damaged[at] ^= bit
            assert places(damaged, before=clean) == places(damaged, before=None)
    for length in range(8, len(clean)):
        assert places(bytearray(clean[:length]), before=clean) == places(
            bytearray(clean[:length]), before=None
        )


def test_headers_of_other_forms_are_read_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed or not, and with a word more in them, as another release of Arrow may write them."""
    packs = random_packs(6)
    messages = [_message([pack]) for pack in packs]
    monkeypatch.setattr("packer.shard.encode._write_options", pa.ipc.IpcWriteOptions)
    messages[1::3] = [_message([pack]) for pack in packs[1::3]]
    monkeypatch.setattr("packer.shard.encode.STAMP_KEY", b"padfree.stamp.by.a.longer.name")
    messages[2::3] = [_message([pack]) for pack in packs[2::3]]
    assert len({header_bytes for _, header_bytes in messages}) > 1
    for order in ((0, 1, 2, 3, 4, 5), (0, 3, 1, 4, 2, 5), (5, 4, 2, 0, 1, 3)):
        for number in order:
            assert shard.decode_pack(*messages[number]) == packs[number]


@given(st.lists(st.booleans(), max_size=70), st.integers(0, 2**31 - 1))
def test_labels_out_of_bits_are_those_out_of_a_mask(trained: list[bool], token: int) -> None:
    ids = np.arange(token - len(trained), token, dtype=np.int32)
    ids[ids < 0] = 0
    mask = np.array(trained, np.bool_)
    rest: dict[str, Any] = {"cu_seqlens": np.zeros(1, np.int32), "example_ids": np.zeros(0, np.int64)}
    bits = Bits(np.packbits(mask, bitorder="little"), len(mask))
    stored, made = Pack(input_ids=ids, loss_mask=bits, **rest), Pack(input_ids=ids, loss_mask=mask, **rest)
    wanted = [token if is_trained else -100 for token, is_trained in zip(ids.tolist(), trained, strict=True)]
    for pack in (stored, made):
        assert pack.labels.dtype == np.int32
        assert pack.labels.tolist() == wanted
        assert pack.loss_mask.tolist() == trained
        assert pack.labels.tolist() == wanted
    copied = pickle.loads(pickle.dumps(Pack(input_ids=ids, loss_mask=bits, **rest)))
    assert copied == stored == made


def test_a_mask_that_was_written_to_counts() -> None:
    pack = shard.decode_pack(*_message([pack_of([[5, 6, 7]], [0])]))
    assert pack.labels.tolist() == [-100, 6, 7]
    pack.loss_mask[1] = False
    assert pack.labels.tolist() == [-100, -100, 7]
    assert pack.num_trained == 1


def test_positions_of_any_length_are_counted() -> None:
    for lengths in ([3, 1], [20_000], [1, 30_000, 2], [5] * 3):
        cu = np.cumsum([0, *lengths]).astype(np.int32)
        found = shard.position_ids(cu)
        assert found.dtype == np.int32
        assert found.tolist() == [place for length in lengths for place in range(length)]
        found[:] = -1  # nobody else's


def test_a_message_of_several_packs() -> None:
    many = random_packs(3)
    message = shard.encode_message(many, stamp=Stamp(epoch=1, step=4, num_items=12, step_done=True))
    header = 8 + int.from_bytes(message[4:8], "little")
    assert shard.verify_message(message, header).num_items == 12
    assert shard.decode_message(message) == many


def test_a_damaged_or_foreign_message_is_told() -> None:
    message = bytearray(shard.encode_message(random_packs(1), stamp=Stamp()))
    header = 8 + int.from_bytes(message[4:8], "little")
    message[-1] ^= 1
    with pytest.raises(ShardError, match="checksum"):
        shard.verify_message(message, header)
    with pytest.raises(ShardError, match="cut off"):
        shard.verify_message(message[:-8], header)
    with pytest.raises(ShardError, match="no padfree stamp"):
        shard.read_stamp(b"\xff" * 200)


def test_a_padding_pack_trains_nothing_and_is_valid() -> None:
    pack = shard.padding_pack(3)
    shard.check(pack)
    assert pack.num_trained == 0
    assert pack.example_ids.tolist() == [shard.PADDING_ID]


# ------------------------------------------------------------------ golden


def golden_packs() -> list[Pack]:
    """The packs that tests/golden/shard-v1.json writes down."""
    return [
        Pack(
            input_ids=np.array(row["input_ids"], np.int32),
            loss_mask=np.array(row["loss_mask"], np.bool_),
            cu_seqlens=np.array(row["cu_seqlens"], np.int32),
            example_ids=np.array(row["example_ids"], np.int64),
        )
        for row in json.loads((GOLDEN / "shard-v1.json").read_text())
    ]


def test_golden_shard_reads_as_written_down() -> None:
    data = (GOLDEN / "shard-v1.arrow").read_bytes()
    assert shard.validate(data, dataset="0123456789abcdef0123456789abcdef") == len(golden_packs())
    assert list(shard.read_packs(data)) == golden_packs()


def test_golden_packs_give_the_golden_bytes() -> None:
    data, _ = shard.encode_shard(golden_packs(), "0123456789abcdef0123456789abcdef")
    assert bytes(data) == (GOLDEN / "shard-v1.arrow").read_bytes()


@pytest.mark.parametrize("shift", [0, 8, 64])
def test_stamping_many_is_stamping_each(shift: int) -> None:
    """Also where a header is not like the first one: shifted by some bytes between prefix and stamp."""
    messages = [bytearray(_message([pack])[0]) for pack in random_packs(5)]
    for message in messages[1::2]:
        message[8:8] = bytes(shift)
        message[4:8] = (int.from_bytes(message[4:8], "little") + shift).to_bytes(4, "little")
    data = bytearray(b"".join(messages))
    starts = np.cumsum([0, *map(len, messages)])[:-1].tolist()
    step, items, done = np.arange(5) * 7, np.array([0, 1, 999, 10**6, 10**12 - 1]), np.arange(5) % 2 == 0
    says = [
        {"epoch": 3, "step": int(step[i]), "num_items": int(items[i]), "step_done": bool(done[i])}
        for i in range(5)
    ]
    shard.stamp_all(memoryview(data), starts, [shard.stamp_text(**one) for one in says])
    wanted = b""
    for i, message in enumerate(messages):
        size = 8 + int.from_bytes(message[4:8], "little")
        wanted += shard.stamped(bytes(message[:size]), **says[i]) + bytes(message[size:])
    assert bytes(data) == wanted


def test_stamping_what_is_no_message_is_told() -> None:
    text = shard.stamp_text(epoch=0, step=1, num_items=1, step_done=True)
    with pytest.raises(ShardError, match="no padfree stamp"):
        shard.stamp_all(memoryview(bytearray(400)), [0], [text])
    good = bytearray(_message(random_packs(1))[0])
    with pytest.raises(ShardError, match="no padfree stamp"):
        shard.stamp_all(memoryview(good + bytes(400)), [0, len(good)], [text, text])
    with pytest.raises(ShardError, match="no room for epoch 0, step 1000000000000"):
        shard.stamp_text(epoch=0, step=10**12, num_items=1, step_done=True)


@pytest.mark.parametrize("way", ["one", "all", "made"])
def test_every_byte_of_a_stamp_that_was_sent_is_checked(way: str) -> None:
    says: dict[str, Any] = {"epoch": 1, "step": 20, "num_items": 345, "step_done": True}
    packs = random_packs(1)
    message, header_bytes = _message(packs)
    sent = bytearray(message)
    if way == "one":
        sent[:header_bytes] = shard.stamped(bytes(message[:header_bytes]), **says)
    elif way == "all":
        shard.stamp_all(memoryview(sent), [0], [shard.stamp_text(**says)])
    else:
        sent = bytearray(shard.encode_message(packs, stamp=Stamp(**says)))
    stamp = shard.verify_message(sent, header_bytes)
    assert (stamp.epoch, stamp.step, stamp.num_items, stamp.step_done) == (1, 20, 345, True)
    at = bytes(sent).index(b"padfree1 crc32=")
    for place in range(at, at + len(stamp.encode())):
        for other in b"0123456789abcdef":
            damaged = bytearray(sent)
            if damaged[place] != other:
                damaged[place] = other
                with pytest.raises(ShardError):
                    shard.verify_message(damaged, header_bytes)


def test_many_texts_of_stamps_are_those_of_each() -> None:
    numbers = [0, 1, 999, 1000, 12_345_678, 10**11, 10**12 - 1]
    step, items = np.array(numbers), np.array(numbers[::-1])
    done = np.arange(len(numbers)) % 2 == 0
    texts = shard.stamp_texts(epoch=12, step=step, num_items=items, step_done=done)
    assert texts == [
        shard.stamp_text(epoch=12, step=int(s), num_items=int(i), step_done=bool(d))
        for s, i, d in zip(step, items, done, strict=True)
    ]
    assert shard.stamp_texts(epoch=0, step=step[:0], num_items=items[:0], step_done=done[:0]) == []
    with pytest.raises(ShardError, match="no room for epoch 0, step 1000000000000, 1 items"):
        shard.stamp_texts(epoch=0, step=np.array([10**12]), num_items=np.array([1]), step_done=done[:1])
    with pytest.raises(ShardError, match="no room for epoch 100000000"):
        shard.stamp_texts(epoch=10**8, step=step, num_items=items, step_done=done)
    with pytest.raises(ShardError, match="no room for epoch 0, step 5, -1 items"):
        shard.stamp_texts(epoch=0, step=np.array([5]), num_items=np.array([-1]), step_done=done[:1])


@pytest.mark.parametrize("value", [0x00, 0x20, 0x2D, 0x5F, 0x7A, 0xF1, 0xFF])  # also " ", "-", "_", "z"
def test_a_message_that_is_damaged_anywhere_is_told_when_it_is_stamped(value: int) -> None:
    """By a ShardError, which is what has a damaged copy fetched again; or its bytes are right once more."""
    message, header_bytes = _message(random_packs(1))
    text = shard.stamp_text(epoch=1, step=2, num_items=3, step_done=True)
    well = bytearray(message)
    shard.stamp_all(memoryview(well), [0], [text])
    for at in [*range(header_bytes), *range(header_bytes, len(message), 97), len(message) - 1]:
        damaged = bytearray(message)
        damaged[at] = value
        try:
            shard.stamp_all(memoryview(damaged), [0], [text])
            shard.verify_message(damaged, 8 + int.from_bytes(damaged[4:8], "little"))
        except ShardError:
            continue
        assert damaged == well


def test_a_stamp_that_is_damaged_at_rest_is_not_made_whole() -> None:
    """Stamping keeps a wrong checksum wrong, so that who receives the message finds it out."""
    message, header_bytes = _message(random_packs(1))
    at = bytes(message).index(b"step=") + 7
    damaged = bytearray(message)
    damaged[at] ^= 1
    text = shard.stamp_text(epoch=1, step=2, num_items=3, step_done=True)
    shard.stamp_all(memoryview(damaged), [0], [text])
    with pytest.raises(ShardError, match="checksum"):
        shard.verify_message(damaged, header_bytes)
