"""dataset://ID as a source: the segments packed anew are what packing the files anew would have given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from packing_job import Packed, pack_document, spec_of, write_rows, write_tokenizer
from packs import random_packs
from s3 import s3_server, use

from packer import pipeline, resolve, sources
from packer import rows as rows_module
from packer.coordinator import PackingFailed, pack
from packer.manifest import Manifest, dataset_key
from packer.measure import measure
from packer.preview import preview
from packer.runners import InlineRunner
from packer.sources import SourceError, partitions, segments
from packer.spec import SpecError, parse_spec
from packer.store import LocalStore, open_store
from packer.tokenization import TokenizerError

WORDS = [chr(ord("a") + i) for i in range(26)]
# What depends on how text was cut into partitions or on a text that was never tokenized.
OTHER = {"warnings", "tokens_in", "rows_in", "rows_empty", "rows_untrained", "rows_rejected", "rejected"}
OTHER |= {"tokens_dropped", "num_shards", "ignored"}


def rows(count: int, longest: int = 30) -> list[dict[str, Any]]:
    """Prompts and completions of 1 to `longest` words; every 17th without a completion's words."""
    random = np.random.default_rng(5)
    found = []
    for number in range(count):
        words = random.choice(WORDS, int(random.integers(2, longest))).tolist()
        cut = int(random.integers(1, len(words)))
        found.append({"prompt": " ".join(words[:cut]), "completion": " ".join(words[cut:])})
        if number % 17 == 3:
            found[-1] = {"prompt": "", "completion": ""}
    return found


def source_of(tmp_path: Path, examples: list[dict[str, Any]], **more: Any) -> tuple[Packed, dict[str, Any]]:
    """The examples packed, and the spec that did it."""
    document = spec_of(
        write_rows(tmp_path / "rows.jsonl", examples), write_tokenizer(tmp_path / "tokenizer"), **more
    )
    return pack_document(tmp_path / "store", document), document


def repacked(tmp_path: Path, dataset: str, **more: Any) -> Packed:
    return pack_document(tmp_path / "store", spec_of([f"dataset://{dataset}"], None, **more))


def segments_of(packed: Packed) -> Counter[tuple[int, tuple[int, ...], tuple[bool, ...]]]:
    return Counter(
        (example, tuple(ids), tuple(mask))
        for example, pieces in packed.segments.items()
        if example >= 0
        for ids, mask in pieces
    )


def packs_of(packed: Packed) -> list[tuple[list[int], list[int], list[bool], list[int]]]:
    return [
        (p.example_ids.tolist(), p.input_ids.tolist(), p.loss_mask.tolist(), p.cu_seqlens.tolist())
        for p in packed.packs
    ]


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and from then on nothing may be rendered or tokenized."""

    def forbid(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be rendered or tokenized")

    def engage() -> None:
        for module, name in (
            (rows_module, "renderer_of"),
            (rows_module, "Tokenizer"),
            (resolve, "Tokenizer"),
            (resolve, "make_renderer"),
        ):
            monkeypatch.setattr(module, name, forbid)

    return engage


LAYOUTS = [
    {"max_tokens": 64},
    {"max_tokens": 32, "scope": "global"},
    {"max_tokens": 40, "strategy": "sequential"},
    {"max_tokens": 128, "strategy": "minibatch", "minibatch_size": 4},
    {"max_tokens": 64, "strategy": "step", "step_size": 8},
    {"max_tokens": 64, "segment_multiple": 8, "pack_multiple": 16},
    {"max_tokens": [16, 40, 96]},
    {"max_tokens": 40, "strategy": "wrapped"},
    {"max_tokens": 40, "balance": "attention"},
    {"max_tokens": 16, "overlong": "truncate"},
    {"max_tokens": 16, "overlong": "split"},
    {"max_tokens": 16, "overlong": "drop"},
]


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("packing", LAYOUTS)
def test_repacking_gives_what_packing_gives(
    tmp_path: Path, packing: dict[str, Any], seed: int | None, no_tokenizer: Any
) -> None:
    # The source has padding of both kinds, which must not become tokens.
    first, document = source_of(
        tmp_path,
        rows(150),
        packing={"max_tokens": 96, "segment_multiple": 4, "pack_multiple": 32},
        shuffle_seed=3,
    )
    direct = pack_document(tmp_path / "store", {**document, "packing": packing, "shuffle_seed": seed})
    no_tokenizer()
    again = repacked(tmp_path, first.job.dataset, packing=packing, shuffle_seed=seed)
    assert again.job.dataset != direct.job.dataset
    # One partition of text and one of tokens: the same stream, so the same packs in the same order.
    assert packs_of(again) == packs_of(direct)
    assert segments_of(again) == segments_of(direct)
    assert {k: v for k, v in again.report.items() if k not in {*OTHER, "overlong"}} == {
        k: v for k, v in direct.report.items() if k not in {*OTHER, "overlong"}
    }
    assert again.report["rows_in"] == first.report["rows_packed"]
    assert again.report["tokens_in"] == first.report["tokens_packed"] - first.report["tokens_padding"]
    assert [one["example"] for one in again.report["overlong"]] == [
        one["example"] for one in direct.report["overlong"]
    ]


@pytest.mark.parametrize("seed", [None, 4])
def test_many_partitions_hold_each_segment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    first, document = source_of(tmp_path, rows(600), packing={"max_tokens": 64}, shuffle_seed=1)
    direct = pack_document(
        tmp_path / "store", {**document, "packing": {"max_tokens": 48}, "shuffle_seed": seed}
    )
    monkeypatch.setattr(
        partitions.cut, "__kwdefaults__", {**partitions.cut.__kwdefaults__, "first_bytes": 2000}
    )
    monkeypatch.setattr("packer.sources.segments.MARK_BYTES", 500)
    monkeypatch.setattr("packer.sources.segments._POOL_TOKENS", 200)
    monkeypatch.setattr(pipeline, "SHARD_TOKENS", 1000)
    again = repacked(tmp_path, first.job.dataset, packing={"max_tokens": 48}, shuffle_seed=seed)
    manifest = Manifest(LocalStore(tmp_path / "store"), again.job.dataset)
    manifest.refresh()
    assert 3 < manifest.num_commits < len(manifest.shards)
    assert segments_of(again) == segments_of(direct)
    for name in ("rows_packed", "tokens_packed", "tokens_trained"):
        assert again.report[name] == direct.report[name]
    # And once more, from several shards in several partitions.
    third = repacked(tmp_path, again.job.dataset, packing={"max_tokens": 64}, shuffle_seed=seed)
    assert segments_of(third) == segments_of(direct)


def test_a_chain_keeps_places_and_warnings(tmp_path: Path) -> None:
    examples = rows(60)
    examples[-1] = {"prompt": "a", "completion": ""}  # the last one is left out: its place must not be lost
    layout = {"max_tokens": 128, "strategy": "minibatch", "minibatch_size": 4}
    first, document = source_of(tmp_path, examples, packing={"max_tokens": 20})
    direct = pack_document(
        tmp_path / "store", {**document, "packing": {"max_tokens": 20, "strategy": "sequential"}}
    )
    second = repacked(tmp_path, first.job.dataset, packing={"max_tokens": 20}, shuffle_seed=2)
    third = repacked(tmp_path, second.job.dataset, packing=layout, shuffle_seed=9)
    once = repacked(tmp_path, first.job.dataset, packing=layout, shuffle_seed=9)
    assert packs_of(third) == packs_of(once)
    assert segments_of(third) == segments_of(direct)
    cut = first.report["rows_truncated"]
    assert cut
    said = f"{cut} of its 60 rows were cut to its max_tokens=20"
    assert [said in warning for warning in third.job.warnings].count(True) == 1
    assert any(said in warning for warning in third.report["warnings"])


def test_pieces_stay_pieces(tmp_path: Path) -> None:
    first, _ = source_of(tmp_path, rows(80), packing={"max_tokens": 12, "overlong": "split"}, shuffle_seed=1)
    again = repacked(tmp_path, first.job.dataset, packing={"max_tokens": 64}, shuffle_seed=5)
    assert segments_of(again) == segments_of(first)
    assert (
        again.report["rows_in"]
        == again.report["rows_packed"]
        == first.report["rows_packed"] + sum(len(pieces) - 1 for pieces in first.segments.values())
    )
    split = first.report["rows_split"]
    assert split
    assert any(f"{split} of its 80 rows were split" in warning for warning in again.job.warnings)
    third = repacked(tmp_path, again.job.dataset, packing={"max_tokens": 32})
    assert segments_of(third) == segments_of(first)


def test_what_is_said_twice_is_the_same_dataset(tmp_path: Path) -> None:
    first, document = source_of(tmp_path, rows(30), packing={"max_tokens": 64})
    path = f"dataset://{first.job.dataset}"
    store = LocalStore(tmp_path / "store")

    def id_of(**more: Any) -> str:
        return resolve.resolve(parse_spec({**spec_of([path], None), **more}), store=store).dataset

    plain = id_of()
    assert id_of(tokenizer=document["tokenizer"], loss="completion") == plain
    assert id_of(packing={"max_tokens": 32}) != plain
    job = resolve.resolve(parse_spec(spec_of([path], None)), store=store)
    assert (job.spec.loss, job.spec.source.format) == ("completion", "tokens")
    assert job.tokenizer_digest == first.job.tokenizer_digest


@pytest.mark.parametrize(
    ("more", "field", "text"),
    [
        ({"loss": "all"}, "loss", 'loss "completion"'),
        ({"source": {"format": "text"}}, "source.format", "holds token ids"),
        ({"source": {"fields": {"text": "body"}}}, "source.fields", "leave it out"),
        ({"tokenizer": {"path": "other"}}, "tokenizer.path", "leave the tokenizer out"),
        (
            {"tokenizer": {"path": "tokenizer", "add_eos": False}},
            "tokenizer.add_eos",
            "leave the tokenizer out",
        ),
    ],
)
def test_conflicts_are_refused(tmp_path: Path, more: dict[str, Any], field: str, text: str) -> None:
    first, _ = source_of(tmp_path, rows(20), packing={"max_tokens": 64})
    write_tokenizer(tmp_path / "other", toy.byte_level_bundle())
    if "tokenizer" in more:
        more = {"tokenizer": {**more["tokenizer"], "path": str(tmp_path / more["tokenizer"]["path"])}}
    document = spec_of([f"dataset://{first.job.dataset}"], None, source=more.get("source", {})) | {
        name: value for name, value in more.items() if name != "source"
    }
    with pytest.raises(SpecError, match=text) as caught:
        resolve.resolve(parse_spec(document), store=LocalStore(tmp_path / "store"))
    assert caught.value.field == field


def test_a_source_may_be_called_as_everywhere(tmp_path: Path) -> None:
    """The id that is made is that of the source's whole id, however it was called."""
    first, document = source_of(tmp_path, rows(30), name="caps")
    store = LocalStore(tmp_path / "store")

    def made(called: str) -> str:
        spec = parse_spec(spec_of([f"dataset://{called}"], None, packing={"max_tokens": 64}))
        return resolve.resolve(spec, store=store).dataset

    whole = made(first.job.dataset)
    assert made("caps") == made(first.job.dataset[:6]) == whole
    with pytest.raises(SourceError, match=r"'cap'.*did you mean 'caps'"):
        made("cap")
    second = pack_document(tmp_path / "store", {**document, "name": "caps", "shuffle_seed": 9})
    with pytest.raises(SourceError) as caught:
        made("caps")
    assert first.job.dataset in str(caught.value)
    assert second.job.dataset in str(caught.value)
    assert made(first.job.dataset[:8]) == whole


def test_a_source_that_is_not_ready_is_refused_with_its_state(tmp_path: Path) -> None:
    first, _ = source_of(tmp_path, rows(20), packing={"max_tokens": 64})
    store = LocalStore(tmp_path / "store")

    def refused(*paths: str) -> str:
        with pytest.raises(SourceError) as caught:
            resolve.resolve(parse_spec(spec_of(list(paths), None)), store=store)
        return str(caught.value)

    path = f"dataset://{first.job.dataset}"
    assert "found none of that id" in refused("dataset://" + "0" * 32)
    assert "beginning of one (4 digits or more) or a name" in refused("dataset://../x")
    assert "is required alone" in refused(path, str(tmp_path / "rows.jsonl"))
    finished = store.get(dataset_key(first.job.dataset, "finished.json"))
    store.delete(dataset_key(first.job.dataset, "finished.json"))
    assert "not packed yet (1 of 1 partitions); wait" in refused(path)
    store.put(dataset_key(first.job.dataset, "failed.json"), b'{"detail": "a bad row"}')
    assert "failed (a bad row)" in refused(path)
    store.put(dataset_key(first.job.dataset, "finished.json"), finished)
    with pytest.raises(TokenizerError):
        resolve.resolve(parse_spec(spec_of([path], tmp_path / "none")), store=store)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_source_that_is_removed_meanwhile_fails_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    first, _ = source_of(tmp_path, rows(50), packing={"max_tokens": 64})
    store = LocalStore(tmp_path / "store")
    job = resolve.resolve(parse_spec(spec_of([f"dataset://{first.job.dataset}"], None)), store=store)
    read = sources.read_segments

    def removed_first(*args: Any, **more: Any) -> Any:
        store.delete(dataset_key(first.job.dataset))
        return read(*args, **more)

    if moment == "before":
        store.delete(dataset_key(first.job.dataset))
    else:
        monkeypatch.setattr(sources, "read_segments", removed_first)
    text = (
        "found none of that id"
        if moment == "before"
        else r": shards/\S+ is gone: the dataset was removed while it was repacked; pack it again"
    )
    with pytest.raises(PackingFailed, match=text):
        pack(job, store, InlineRunner())


def test_a_damaged_pack_is_never_repacked(tmp_path: Path) -> None:
    first, _ = source_of(tmp_path, rows(50), packing={"max_tokens": 64})
    store = LocalStore(tmp_path / "store")
    manifest = Manifest(store, first.job.dataset)
    manifest.refresh()
    path = store.path(manifest.shards[0].key)
    data, row = bytearray(path.read_bytes()), manifest.rows[1]
    data[row["offset"] + row["header_bytes"] + 40] ^= 1  # a token of the second pack
    path.write_bytes(data)
    job = resolve.resolve(parse_spec(spec_of([f"dataset://{first.job.dataset}"], None)), store=store)
    with pytest.raises(PackingFailed, match="is damaged"):
        pack(job, store, InlineRunner())


def test_lengths_and_preview_come_from_the_segments(tmp_path: Path) -> None:
    first, _ = source_of(tmp_path, rows(40), packing={"max_tokens": 64}, shuffle_seed=3)
    store = LocalStore(tmp_path / "store")
    job = resolve.resolve(parse_spec(spec_of([f"dataset://{first.job.dataset}"], None)), store=store)
    lengths = measure(job, store).lengths
    wanted = [len(first.segments[example][0][0]) for example in sorted(first.segments)]
    assert lengths[lengths > 0].tolist() == wanted
    found = preview(job, store, 5)
    assert [one.example for one in found.examples] == list(first.segments)[:5]
    for one in found.examples:
        ((ids, trained),) = first.segments[one.example]
        assert [token.id for token in one.tokens] == ids
        assert [token.trained for token in one.tokens] == trained
    assert found.num_rows == len(first.segments)
    assert found.examples[0].tokens[-1].text == "<eos>"
    assert found.examples[0].place == f"dataset://{first.job.dataset}, example {found.examples[0].example}"


def test_in_an_object_store_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "cache"))
    first, document = source_of(tmp_path, rows(120), packing={"max_tokens": 64}, shuffle_seed=1)
    more: dict[str, Any] = {"packing": {"max_tokens": 48}, "shuffle_seed": 1}
    here = repacked(tmp_path, first.job.dataset, **more)
    with s3_server({"bucket/": b""}) as url, use(url, monkeypatch):
        place = "s3://bucket/store"
        assert pack_document(place, document).job.dataset == first.job.dataset
        there = pack_document(place, spec_of([f"dataset://{first.job.dataset}"], None, **more))
        store = open_store(place)
        lengths = measure(there.job, store).lengths
        shown = preview(there.job, store, 2)
    assert there.digests == here.digests
    assert there.report == here.report
    assert np.count_nonzero(lengths) == first.report["rows_packed"]
    assert len(shown.examples) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: bytes(len(data)),
        lambda data: data[:2000] + bytes([data[2000] ^ 64]) + data[2001:],
        lambda data: data[:4000],
        lambda data: b"",
    ],
    ids=["zeroed", "flipped", "cut", "emptied"],
)
def test_a_damaged_copy_of_a_shard_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "cache"))
    first, document = source_of(tmp_path, rows(120), packing={"max_tokens": 64}, shuffle_seed=1)
    source = [f"dataset://{first.job.dataset}"]
    wanted = repacked(tmp_path, first.job.dataset, packing={"max_tokens": 48}, shuffle_seed=1)
    with s3_server({"bucket/": b""}) as url, use(url, monkeypatch):
        pack_document("s3://bucket/store", document)
        pack_document("s3://bucket/store", spec_of(source, None, packing={"max_tokens": 40}))
        copies = [copy for copy in (tmp_path / "cache").iterdir() if copy.read_bytes()[:6] == b"ARROW1"]
        assert len(copies) >= 2  # by digest, and by what the store tells
        for copy in copies:
            copy.write_bytes(damage(copy.read_bytes()))
        spec = spec_of(source, None, packing={"max_tokens": 48}, shuffle_seed=1)
        assert pack_document("s3://bucket/store", spec).digests == wanted.digests


def test_boundaries_that_are_not_the_packs_are_damage() -> None:
    """They are read without the pack's checksum, and held against the pack once that is read."""
    pack = random_packs(1, max_tokens=64)[0]
    found = np.zeros(pack.num_segments, segments.SEGMENT)
    found["example"], found["start"] = pack.example_ids, pack.cu_seqlens[:-1]
    found["length"] = np.diff(pack.cu_seqlens)
    assert segments._holds(pack, found)
    assert segments._holds(pack, found[1:])
    for name in ("example", "start", "length"):
        for change in (1, 1000):
            wrong = found.copy()
            wrong[name][-1] += change
            assert not segments._holds(pack, wrong)
