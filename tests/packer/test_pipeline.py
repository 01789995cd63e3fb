"""From rows to shards in a store: the pipeline and the coordinator together, inline."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_job import (
    STRATEGIES,
    Packed,
    pack_document,
    packing_of,
    read_back,
    spec_of,
    write_rows,
    write_tokenizer,
)
from tokenizers import Tokenizer

from packer import coordinator, pipeline, sources
from packer.coordinator import Busy, Cancelled, PackingFailed, pack
from packer.manifest import Manifest, dataset_key, lock_key
from packer.packing import PackPlan, training
from packer.resolve import resolve
from packer.runners import Done, InlineRunner, WorkerDied
from packer.spec import PackingSpec, SpecError, parse_spec
from packer.store import LocalStore, StoreError
from packer.tokenization import TokenizerError
from packer.verify import verify_store
from packer.view import dataset_view


def pack_rows(tmp_path: Path, rows: list[Any], **more: Any) -> Packed:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    return pack_document(tmp_path / "store", spec_of(source, tokenizer, **more))


def tokens(*lengths: int) -> list[dict[str, Any]]:
    """Rows of ready ids, all different."""
    rows, first = [], 20
    for length in lengths:
        rows.append({"input_ids": list(range(first, first + length))})
        first += length
    return rows


def lengths(packed: Packed) -> list[int]:
    return sorted(len(ids) for pieces in packed.segments.values() for ids, _ in pieces)


# ------------------------------------------------------------------ public fault cases


def segment_labels(packed: Packed) -> list[list[int]]:
    return sorted(
        one.labels[a:b].tolist()
        for one in packed.packs
        for a, b in zip(one.cu_seqlens, one.cu_seqlens[1:], strict=False)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f03_the_completion_mask_survives_packing(tmp_path: Path, strategy: str) -> None:
    rows = [toy.chat(("user", "a b"), ("assistant", "c d")), toy.chat(("user", "e"), ("assistant", "f"))]
    packed = pack_rows(tmp_path, rows, loss="assistant", packing=packing_of(strategy, 16, group=2))
    assert segment_labels(packed) == sorted([[-100] * 6 + [12, 13, 7], [-100] * 5 + [15, 7]])
    assert len(packed.packs) == (2 if strategy == "padded" else 1)
    assert sum(one.num_tokens for one in packed.packs) == 16
    assert sum(one.num_trained for one in packed.packs) == packed.report["tokens_trained"] == 5


F04 = [{"input_ids": ids} for ids in ([21, 22, 23, 24, 25], [31], [41, 42, 43], [51, 52])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f04_split_keeps_every_token(tmp_path: Path, strategy: str) -> None:
    packing = packing_of(strategy, 3, group=4, overlong="split")
    if strategy == "minibatch":  # one pack, whatever its length: it can neither be split nor lose anything
        with pytest.raises(PackingFailed, match=r"mini-batch 0 .* with 10 tokens.* raise max_tokens"):
            pack_rows(tmp_path, F04, packing=packing)
        return
    packed = pack_rows(tmp_path, F04, packing=packing)
    assert len(packed.packs) == 4
    ids = [i for one in packed.packs for i in one.input_ids.tolist()]
    assert sorted(ids) == [21, 22, 23, 24, 25, 41, 42, 43, 51, 52]
    assert sorted(piece for piece, _ in packed.segments[0]) == [[21, 22, 23], [24, 25]]
    # The row of one token trains nothing; of 51 and 52, which "wrapped" cuts apart, each stands first.
    is_cut = strategy == "wrapped"
    assert packed.report["rows_split"] == (2 if is_cut else 1)
    assert packed.report["rows_untrained"] == (2 if is_cut else 1)
    assert packed.report["tokens_dropped"] == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f04_truncate_reports_what_it_drops(tmp_path: Path, strategy: str) -> None:
    packed = pack_rows(tmp_path, F04, packing=packing_of(strategy, 3, group=1, overlong="truncate"))
    ids = {i for one in packed.packs for i in one.input_ids.tolist()}
    # The stream of `wrapped` is cut anyway: nothing is too long for it.
    lost = set() if strategy == "wrapped" else {24, 25}
    assert ids == {21, 22, 23, 24, 25, 41, 42, 43, 51, 52} - lost
    assert packed.report["rows_truncated"] == bool(lost)
    assert packed.report["tokens_dropped"] == len(lost | {31})  # the row of one token trains nothing


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f05_no_row_is_skipped_without_being_counted(tmp_path: Path, strategy: str) -> None:
    packing = packing_of(strategy, 8, group=4 if strategy == "step" else 2, overlong="drop")
    packed = pack_rows(tmp_path, tokens(3, 5, 2, 9), packing=packing)
    assert lengths(packed) == [2, 3, 5]
    assert len(packed.packs) == (3 if strategy == "padded" else 2)
    report = packed.report
    assert (report["rows_in"], report["rows_packed"], report["rows_overlong"]) == (4, 3, 1)
    assert set(packed.segments) == {0, 1, 2}
    assert [(row["example"], row["line"]) for row in report["overlong"]] == [(3, 4)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f06_empty_rows_make_no_segment(tmp_path: Path, strategy: str) -> None:
    packed = pack_rows(tmp_path, tokens(2, 0, 3), packing=packing_of(strategy, 8, group=3))
    assert packed.report["rows_empty"] == 1
    found = [one.cu_seqlens.tolist() for one in packed.packs]
    assert found == ([[0, 2], [0, 3]] if strategy == "padded" else [[0, 2, 5]]) or found == [[0, 3, 5]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("length", "packs", "boundaries"), [(8, 1, [0, 8]), (7, 1, [0, 7, 8]), (9, 0, None)])
def test_f07_one_length_is_used_throughout(
    tmp_path: Path, length: int, packs: int, boundaries: list[int] | None, strategy: str
) -> None:
    packing = packing_of(strategy, 8, group=1, pack_multiple=8, overlong="drop")
    if isinstance(packing["max_tokens"], list):
        packing["max_tokens"] = [8, 16]
        length, boundaries = (length, boundaries) if length < 9 else (17, None)
    packed = pack_rows(tmp_path, tokens(length), packing=packing)
    assert len(packed.packs) == packs
    if boundaries is None:
        assert packed.report["rows_overlong"] == 1
        return
    (only,) = packed.packs
    assert only.cu_seqlens.tolist() == boundaries
    assert len(only.input_ids) == len(only.labels) == boundaries[-1]
    assert packed.report["tokens_padding"] == 8 - length
    assert packed.report["rows_truncated"] == 0
    if length == 7:
        assert only.labels[-1] == -100


@pytest.mark.parametrize(("strategy", "packs"), [("best_fit", 3), ("best_fit global", 3), ("sequential", 4)])
def test_f51_packing_is_close_to_full_and_says_so(tmp_path: Path, strategy: str, packs: int) -> None:
    packing = packing_of(strategy, 10, group=1)
    packed = pack_rows(tmp_path, tokens(5, 5, 5, 3, 3, 3, 2, 2, 2), packing=packing)
    assert len(packed.packs) == packed.report["num_packs"] == packs
    assert packed.report["fill"] == 30 / (packs * 10)
    assert packed.report["lower_bound_packs"] == 3


def test_f11_a_truncated_answer_keeps_its_mask(tmp_path: Path) -> None:
    rows = [toy.chat(("user", "a b"), ("assistant", "c d e f"))]
    packed = pack_rows(tmp_path, rows, loss="assistant", packing={"max_tokens": 8})
    assert packed.segments[0] == [([1, 4, 10, 11, 7, 5, 12, 13], [False] * 6 + [True] * 2)]
    assert packed.report["rows_truncated"] == 1


def test_f15_a_changed_template_gives_another_dataset(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [toy.chat(("user", "a"), ("assistant", "b"))])

    def run(template: str) -> Packed:
        folder = write_tokenizer(tmp_path / "tokenizer", toy.bundle(chat_template=template))
        return pack_document(tmp_path / "store", spec_of(source, folder, packing={"max_tokens": 64}))

    first = run(toy.T1)
    second = run(toy.template(prelude="{{- '<sys> z <end>' }}"))
    again = run(toy.T1)
    assert first.packs[0].input_ids.tolist() == [1, 4, 10, 7, 5, 11, 7]
    assert second.packs[0].input_ids.tolist() == [1, 3, 35, 7, 4, 10, 7, 5, 11, 7]
    assert second.job.dataset != first.job.dataset == again.job.dataset


def test_f18_a_clash_of_types_matters_only_in_a_field_that_is_used(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "f1.jsonl", [{"text": "a", "r": {"b": 23}}])
    write_rows(tmp_path / "in" / "f2.jsonl", [{"text": "b", "r": {"b": "c"}}])
    tokenizer = write_tokenizer(tmp_path / "tokenizer")

    def run(**source: Any) -> Packed:
        more = {"source": source, "packing": {"max_tokens": 8}}
        return pack_document(tmp_path / "store", spec_of(tmp_path / "in", tokenizer, **more))

    assert run().report["rows_packed"] == 2
    packed = run(fields={"text": "r.b"}, on_bad_row="skip")
    assert (packed.report["rows_packed"], packed.report["rows_rejected"]) == (1, 1)
    assert [ids[0] for ((ids, _),) in packed.segments.values()] == [12]  # c
    (rejected,) = packed.report["rejected"]
    assert (Path(rejected["file"]).name, rejected["line"]) == ("f1.jsonl", 1)
    assert rejected["reason"] == "field r.b: a text is required, found a number (23)"


def test_f22_a_line_of_20_mib_is_a_row_that_is_truncated(tmp_path: Path) -> None:
    words = 209_716 * ("a" * 99 + " ")  # long ones, else the test splits text for most of its time
    rows = [{"text": "a"}, {"text": words}, {"text": "b"}]
    assert len(words) >= 20 << 20
    packed = pack_rows(tmp_path, rows, packing={"max_tokens": 1024})
    assert packed.report["rows_truncated"] == 1
    assert [len(packed.segments[row][0][0]) for row in range(3)] == [2, 1024, 2]
    assert packed.segments[2][0][0] == [11, 2]


def test_f24_what_lies_in_a_folder_and_is_ignored_is_in_the_report(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.jsonl", [{"text": "a"}])
    write_rows(tmp_path / "in" / ".hidden.jsonl", [{"text": "h"}])
    (tmp_path / "in" / "d.txt.bak").write_text("d")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    packed = pack_document(tmp_path / "store", spec_of(tmp_path / "in", tokenizer, packing={"max_tokens": 8}))
    assert packed.report["rows_in"] == 1
    assert [Path(name).name for name in packed.report["ignored"]] == [".hidden.jsonl", "d.txt.bak"]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_f19_a_bad_line_is_reported_with_file_and_line(tmp_path: Path, policy: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text":"a"}\n{"text": "b"\n[1,2]\n{"text":"c"}\n')
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    document = spec_of(source, tokenizer, source={"on_bad_row": policy}, packing={"max_tokens": 8})
    if policy == "fail":
        with pytest.raises(PackingFailed, match=r"rows\.jsonl, line 2"):
            pack_document(tmp_path / "store", document)
        store = LocalStore(tmp_path / "store")
        (dataset,) = os.listdir(tmp_path / "store" / "datasets")
        view = dataset_view(store, dataset)
        assert view is not None
        assert view["state"] == "failed"
        assert "line 2" in view["error"]["detail"]
        assert Manifest(store, dataset).num_packs == 0
        assert store.list(dataset_key(dataset, "shards")) == []
        return
    packed = pack_document(tmp_path / "store", document)
    assert packed.report["rows_packed"] == 2
    assert packed.report["rows_rejected"] == 2
    assert [(row["line"], Path(row["file"]).name) for row in packed.report["rejected"]] == [
        (2, "rows.jsonl"),
        (3, "rows.jsonl"),
    ]
    assert "JSON" in packed.report["rejected"][0]["reason"]
    assert "object" in packed.report["rejected"][1]["reason"]


# ------------------------------------------------------------------ reports add up


@settings(max_examples=25)
@given(
    rows=st.lists(st.integers(0, 30), max_size=40),
    max_tokens=st.integers(1, 20),
    strategy=st.sampled_from(["best_fit", "sequential", "wrapped", "minibatch", "step", "padded"]),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
    seed=st.sampled_from([None, 0, 3]),
    untrained=st.integers(0, 2**16),
)
def test_every_token_is_packed_once_or_counted(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[int],
    max_tokens: int,
    strategy: str,
    overlong: str,
    seed: int | None,
    untrained: int,
) -> None:
    documents = tokens(*rows) or [{"input_ids": []}]
    for number, row in enumerate(documents):
        ids = row["input_ids"]
        row["labels"] = [-100] * len(ids) if untrained >> (number % 17) & 1 else list(ids)
    try:
        packed = pack_rows(
            tmp_path_factory.mktemp("job"),
            [
                row
                | {"input_ids": [i % 500 for i in row["input_ids"]]}
                | {"labels": [i % 500 if i >= 0 else i for i in row["labels"]]}
                for row in documents
            ],
            packing={
                "strategy": strategy,
                "max_tokens": max_tokens,
                "overlong": overlong,
                "minibatch_size": 3,
                "step_size": 4,
            },
            shuffle_seed=seed,
        )
    except PackingFailed as error:
        if strategy == "minibatch" and "mini-batch" in str(error):
            return  # one that does not fit into one pack says so
        if "nothing to train" in str(error):
            # Of a segment the first token is never trained.
            assert max_tokens == 1 or all(
                label == -100
                for row in documents
                for at, label in enumerate(row["labels"])
                if at % max_tokens and (overlong == "split" or at < max_tokens)
            )
            return
        raise
    report = packed.report
    left = report["rows_empty"] + report["rows_overlong"] + report["rows_rejected"] + report["rows_untrained"]
    assert report["rows_in"] == len(documents) == report["rows_packed"] + left
    stored = sum(one.num_tokens for one in packed.packs)
    assert stored == report["tokens_packed"]
    assert report["tokens_in"] == stored + report["tokens_dropped"]
    assert report["tokens_trained"] == sum(one.num_trained for one in packed.packs)
    assert report["num_packs"] == len(packed.packs)
    assert report["rows_packed"] == sum(
        any(any(mask) for _, mask in pieces) for pieces in packed.segments.values()
    )
    if stored:
        assert report["fill"] == stored / (len(packed.packs) * max_tokens)
    for example, pieces in packed.segments.items():
        source = [i % 500 for i in documents[example]["input_ids"]]
        joined = [i for piece, _ in pieces for i in piece]
        assert strategy == "wrapped" or any(any(mask) for _, mask in pieces)
        if strategy == "wrapped" or overlong == "split":
            assert sorted(joined) == sorted(source)
        else:
            assert joined == source[: len(joined)]


def test_a_row_that_truncation_leaves_untrained_is_counted_and_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "a b c d", "completion": "e"}, {"prompt": "a", "completion": "b"}]
    packed = pack_rows(tmp_path, rows, packing={"max_tokens": 4})
    assert set(packed.segments) == {1}
    report = packed.report
    assert (report["rows_untrained"], report["rows_packed"]) == (1, 1)
    assert report["tokens_in"] == report["tokens_packed"] + report["tokens_dropped"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_of_which_no_token_but_the_first_is_labelled_is_untrained(
    tmp_path: Path, strategy: str
) -> None:
    rows = [
        {"input_ids": [21, 22, 23], "labels": [21, -100, -100]},
        {"input_ids": [31], "labels": [31]},
        {"input_ids": [41, 42, 43], "labels": [-100, -100, 43]},
    ]
    packed = pack_rows(tmp_path, rows, packing=packing_of(strategy, 8, group=3))
    report = packed.report
    assert (report["rows_in"], report["rows_packed"], report["rows_untrained"]) == (3, 1, 2)
    assert (report["tokens_packed"], report["tokens_dropped"], report["tokens_trained"]) == (3, 4, 1)
    assert set(packed.segments) == {2}


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ([-100, -100, -100, -100, 5], {"overlong": "split"}),  # the first token of the second piece
        ([1, -100, -100, -100, 5], {"overlong": "truncate"}),
        ([-100, 2, -100, -100, -100], {"overlong": "truncate", "truncate_side": "left"}),
    ],
)
def test_a_row_that_trains_only_where_a_cut_puts_a_beginning_is_untrained(
    tmp_path: Path, labels: list[int], options: dict[str, Any]
) -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": labels}, *tokens(2)]
    packed = pack_rows(tmp_path, rows, packing={"max_tokens": 4, **options})
    assert (packed.report["rows_packed"], packed.report["rows_untrained"]) == (1, 1)
    assert set(packed.segments) == {1}
    assert packed.report["rows_split"] == packed.report["rows_truncated"] == 0


def test_a_piece_without_trained_tokens_stays_where_its_row_trains_elsewhere(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, -100, -100, 5]}]
    packed = pack_rows(tmp_path, rows, packing={"max_tokens": 4, "overlong": "split"})
    assert sorted(ids for ids, _ in packed.segments[0]) == [[1, 2, 3, 4], [5]]
    assert (packed.report["rows_packed"], packed.report["rows_split"]) == (1, 1)


def test_wrapped_leaves_a_row_that_its_cut_leaves_untrained_in_its_place(tmp_path: Path) -> None:
    # Of each pair that is cut nothing trains; left out, the next pair would be cut in its place.
    packed = pack_rows(tmp_path, tokens(2, 2, 2, 2, 2), packing={"strategy": "wrapped", "max_tokens": 5})
    assert [one.input_ids.tolist() for one in packed.packs] == [[*range(20, 25)], [*range(25, 30)]]
    report = packed.report
    assert (report["rows_packed"], report["rows_untrained"], report["rows_split"]) == (4, 1, 0)
    assert report["tokens_dropped"] == 0


def test_minibatches_are_counted_by_place_though_rows_are_left_out(tmp_path: Path) -> None:
    packed = pack_rows(
        tmp_path,
        tokens(2, 0, 2, 2, 2, 2),
        packing={"strategy": "minibatch", "minibatch_size": 2, "max_tokens": 8},
    )
    assert [one.example_ids.tolist() for one in packed.packs] == [[0], [2, 3], [4, 5]]


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_unreadable_rows_keep_their_place_in_minibatches(tmp_path: Path, seed: int | None) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [json.dumps(row) for row in tokens(*[2] * 12)]
    bad = (1, 4, 9)
    source.write_text("".join(("{" if number in bad else row) + "\n" for number, row in enumerate(rows)))

    def minibatches(on_bad_row: str) -> list[list[int]]:
        packing = {"strategy": "minibatch", "minibatch_size": 3, "max_tokens": 16}
        document = spec_of(
            source, None, source={"on_bad_row": on_bad_row}, packing=packing, shuffle_seed=seed
        )
        packed = pack_document(tmp_path / "store", document)
        return [one.example_ids.tolist() for one in packed.packs]

    left = minibatches("skip")
    source.write_text("\n".join(rows) + "\n")
    whole = minibatches("fail")
    assert left == [batch for batch in ([i for i in one if i not in bad] for one in whole) if batch]


def test_steps_are_marked_in_the_row_index(tmp_path: Path) -> None:
    packed = pack_rows(
        tmp_path, tokens(3, 3, 3, 3, 3), packing={"strategy": "step", "step_size": 2, "max_tokens": 4}
    )
    manifest = Manifest(LocalStore(tmp_path / "store"), packed.job.dataset)
    manifest.refresh()
    assert manifest.rows["step"].tolist() == [0, 0, 1, 1, 2]


def test_padding_stands_directly_behind_what_it_pads(tmp_path: Path) -> None:
    packed = pack_rows(
        tmp_path, tokens(3, 5), packing={"max_tokens": 16, "segment_multiple": 4, "pack_multiple": 16}
    )
    (only,) = packed.packs
    assert np.diff(only.cu_seqlens).tolist() == [3, 1, 5, 3, 4]
    assert only.example_ids.tolist() == [0, -1, 1, -1, -1]
    assert packed.report["tokens_padding"] == 8
    assert packed.report["fill"] == 0.5


# ------------------------------------------------------------------ faults


def _many(tmp_path: Path, rows: int = 400, **more: Any) -> tuple[LocalStore, Any]:
    """A job of several partitions (they are cut by bytes of text)."""
    source = write_rows(
        tmp_path / "rows.jsonl",
        [{"text": " ".join(f"w{40 + (i * j) % 400}" for j in range(1500))} for i in range(rows)],
    )
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    store = LocalStore(tmp_path / "store")
    document = spec_of(source, tokenizer, packing={"max_tokens": 2048}, shuffle_seed=0, **more)
    return store, resolve(parse_spec(document), store=store)


class _Faulty(InlineRunner):
    """Answers some submissions with an error instead of running them."""

    def __init__(self, faults: dict[int, BaseException]) -> None:
        self.faults = faults
        self.submitted = 0

    def open(self) -> Any:
        runner, inner = self, super().open()

        class Tasks:
            def __enter__(self) -> Any:
                self.tasks = inner.__enter__()
                self.failed: list[Done] = []
                return self

            def __exit__(self, *args: object) -> None:
                inner.__exit__(*args)

            def submit(self, function: Any, *args: Any) -> int:
                runner.submitted += 1
                if runner.submitted in runner.faults:
                    self.failed.append(Done(task=-runner.submitted, error=runner.faults[runner.submitted]))
                    return -runner.submitted
                return self.tasks.submit(function, *args)

            def wait(self, timeout_s: float) -> list[Done]:
                failed, self.failed = self.failed, []
                return failed or self.tasks.wait(timeout_s)

        return Tasks()


def test_a_worker_that_dies_is_retried_and_changes_nothing(tmp_path: Path) -> None:
    store, job = _many(tmp_path)
    undisturbed = read_back(store, job, pack(job, store, InlineRunner()))
    assert len(undisturbed.digests) > 1
    other = LocalStore(tmp_path / "other")
    job = resolve(
        parse_spec(
            spec_of(
                tmp_path / "rows.jsonl", tmp_path / "tokenizer", packing={"max_tokens": 2048}, shuffle_seed=0
            )
        ),
        store=other,
    )
    # Submission 1 is the index; 2 and 4 are partitions.
    again = pack(job, other, _Faulty({2: WorkerDied("killed"), 4: WorkerDied("killed")}))
    assert read_back(other, job, again).digests == undisturbed.digests
    assert again == undisturbed.report
    finished = Manifest(other, job.dataset)
    finished.refresh()
    assert finished.finished is not None
    assert finished.finished["retries"] == 2


def test_a_worker_that_dies_or_a_store_that_stumbles_while_inputs_are_indexed_is_retried(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / "in" / f"{name}.jsonl", [{"text": " ".join([name] * n)} for n in range(1, 40)])
    write_tokenizer(tmp_path / "tokenizer")
    document = spec_of(tmp_path / "in", tmp_path / "tokenizer", packing={"max_tokens": 64}, shuffle_seed=1)
    undisturbed = pack_document(tmp_path / "undisturbed", document)
    # Submissions 1 and 2 are the indexes, 3 and 4 their second tries; 3 fails once more.
    faults = {1: WorkerDied("killed"), 2: StoreError("a hiccup"), 3: WorkerDied("killed again")}
    again = pack_document(tmp_path / "again", document, _Faulty(faults))
    assert again.digests == undisturbed.digests
    assert again.report == undisturbed.report
    finished = Manifest(LocalStore(tmp_path / "again"), again.job.dataset)
    finished.refresh()
    assert finished.finished is not None
    assert finished.finished["retries"] == 3


def test_an_input_that_always_kills_its_worker_is_named(tmp_path: Path) -> None:
    store, job = _many(tmp_path)
    runner = _Faulty({number: WorkerDied("out of memory") for number in range(1, 100)})
    with pytest.raises(PackingFailed, match=r"that indexes .*rows.jsonl was killed 3 times: out of memory"):
        pack(job, store, runner)
    assert runner.submitted == 3


def test_f48_work_that_always_kills_its_worker_fails_with_its_range(tmp_path: Path) -> None:
    store, job = _many(tmp_path)
    runner = _Faulty({number: WorkerDied("killed") for number in range(2, 100)})
    with pytest.raises(PackingFailed, match="killed 3 times") as caught:
        pack(job, store, runner)
    assert "examples 0 to" in str(caught.value)


@pytest.mark.parametrize("stop_after", [1, 2])
def test_stopped_and_resumed_packing_gives_the_same_shards(tmp_path: Path, stop_after: int) -> None:
    store, job = _many(tmp_path, rows=1200)
    cancel = threading.Event()

    def stop(manifest: Manifest, _: int) -> None:
        if manifest.num_commits >= stop_after:
            cancel.set()

    with pytest.raises(Cancelled):
        pack(job, store, InlineRunner(), cancel=cancel, on_progress=stop)
    half = Manifest(store, job.dataset)
    half.refresh()
    assert half.finished is None
    assert half.num_commits == stop_after
    resumed = read_back(store, job, pack(job, store, InlineRunner()))
    whole = _many(tmp_path / "whole", rows=1200)
    undisturbed = read_back(*whole, pack(whole[1], whole[0], InlineRunner()))
    assert resumed.digests == undisturbed.digests
    assert resumed.report == undisturbed.report


def test_what_another_release_began_is_not_gone_on_with(tmp_path: Path) -> None:
    store, job = _many(tmp_path, rows=1200)
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        pack(job, store, InlineRunner(), cancel=cancel, on_progress=lambda *_: cancel.set())
    key = dataset_key(job.dataset, "plan.json")
    plan = json.loads(store.get(key))
    store.put(key, json.dumps({**plan, "num_partitions": plan["num_partitions"] + 1}).encode())
    with pytest.raises(PackingFailed, match=r"begun by another release.*delete it and post its spec again"):
        pack(job, store, InlineRunner())


def test_f47_a_full_disk_fails_the_job_and_packing_goes_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, job = _many(tmp_path)
    real = os.fsync
    written = [0]

    def full(descriptor: int) -> None:
        written[0] += os.fstat(descriptor).st_size
        if written[0] > 600_000 and os.fstat(descriptor).st_size > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PackingFailed, match="no space left"):
        pack(job, store, InlineRunner())
    monkeypatch.setattr(os, "fsync", real)
    assert verify_store(store).faults == []
    view = dataset_view(store, job.dataset)
    assert view is not None
    assert view["state"] == "failed"
    assert not [p for p in store.root.rglob("*.arrow") if p.stat().st_size == 0]
    assert not list(store.root.rglob(".tmp-*"))
    resumed = read_back(store, job, pack(job, store, InlineRunner()))
    assert resumed.report["rows_packed"] == 400
    assert verify_store(store).faults == []


def test_one_process_at_a_time_packs_a_dataset(tmp_path: Path) -> None:
    store, job = _many(tmp_path, rows=4)
    with store.lock(lock_key(job.dataset)), pytest.raises(Busy, match=job.dataset):
        pack(job, store, InlineRunner())
    view = dataset_view(store, job.dataset)
    assert view is None  # it was never begun
    pack(job, store, InlineRunner())
    before = pipeline.pack_partition
    try:
        pipeline.pack_partition = coordinator.pack_partition = None  # type: ignore[assignment]
        assert pack(job, store, InlineRunner())["rows_in"] == 4  # known: no work
    finally:
        pipeline.pack_partition = coordinator.pack_partition = before


def test_a_plan_that_breaks_a_rule_is_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> PackPlan:
        planned = real(*args, **kwargs)
        return PackPlan(
            **{
                name: getattr(planned, name)
                for name in PackPlan.__dataclass_fields__
                if name != "tokens_dropped"
            },
            tokens_dropped=planned.tokens_dropped + 1,
        )

    real = training.plan
    monkeypatch.setattr(training, "plan", wrong)
    with pytest.raises(PackingFailed, match="do not add up"):
        pack_rows(tmp_path, tokens(3, 4), packing={"max_tokens": 8})


def test_every_packing_option_reaches_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of the spec that the pipeline forgot to hand on would change nothing, silently."""
    seen: dict[str, Any] = {}
    real = training.plan

    def spy(lengths: Any, max_tokens: int, **options: Any) -> PackPlan:
        seen.update(options, max_tokens=max_tokens)
        return real(lengths, max_tokens, **options)

    monkeypatch.setattr(training, "plan", spy)
    packed = pack_rows(
        tmp_path, tokens(3, 4, 9), packing={"max_tokens": 8, "truncate_side": "left", "scope": "global"}
    )
    packing = packed.job.spec.packing
    assert {name: getattr(packing, name) for name in PackingSpec.__dataclass_fields__} == {
        name: value for name, value in seen.items() if name != "seed"
    }
    assert packed.segments[2][0][0] == [28, 29, 30, 31, 32, 33, 34, 35]


def test_ready_ids_need_no_tokenizer(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", tokens(3, 4))
    packed = pack_document(tmp_path / "store", spec_of(source, None, packing={"max_tokens": 8}))
    assert lengths(packed) == [3, 4]
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    with pytest.raises(SpecError, match=r"tokenizer\.path") as caught:
        pack_document(tmp_path / "store", spec_of(source, None))
    assert caught.value.field == "tokenizer.path"


def test_packs_without_trained_tokens_are_told_and_a_job_of_nothing_else_fails(tmp_path: Path) -> None:
    rows = [{"prompt": "a b c d e f g h", "completion": "i"}]
    packed = pack_rows(tmp_path, rows, packing={"max_tokens": 4, "overlong": "split"})
    assert packed.report["packs_untrained"] == 2
    assert any("2 of 3 packs have nothing to train" in warning for warning in packed.report["warnings"])
    with pytest.raises(PackingFailed, match="nothing to train: of 1 rows 1"):
        pack_rows(tmp_path, rows, packing={"max_tokens": 4})


def test_a_service_reads_templates_under_its_roots_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "elsewhere"
    source = write_rows(inside / "rows.jsonl", [toy.chat(("user", "a"), ("assistant", "b"))])
    write_tokenizer(inside / "tokenizer")
    write_tokenizer(outside / "tokenizer")
    (outside / "secret.txt").write_text("secret")
    (inside / "link").symlink_to(outside / "tokenizer")
    store = LocalStore(tmp_path / "store")

    def resolved(tokenizer: Path, **options: Any) -> Any:
        document = spec_of(source, tokenizer, tokenizer_options=options, loss="all")
        return resolve(parse_spec(document), store=store, roots=[inside])

    for tokenizer in (inside / "tokenizer", outside / "tokenizer", inside / "link"):
        resolved(tokenizer)
    with pytest.raises(TokenizerError, match=r"must hold a tokenizer\.json.*, found none"):
        resolved(outside)  # the names of what lies there are not told
    for template in (outside / "secret.txt", Path("/etc/passwd")):
        with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template.*leads out"):
            resolved(inside / "tokenizer", chat_template=str(template))
    with pytest.raises(TokenizerError, match="cannot be read"):
        resolved(Path("x" * 400))


@pytest.mark.parametrize("seed", [None, 0])
def test_numbers_of_tool_calls_are_never_rounded(tmp_path: Path, seed: int | None) -> None:
    """Arguments as an object and as JSON text give the same tokens, whatever the size of a number."""
    number = 123456789012345678901234567890

    def row(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        return {"messages": turns}

    tokenizer = Path(__file__).parent.parent.parent / "examples" / "tokenizer"
    source = write_rows(tmp_path / "rows.jsonl", [row({"id": number}), row(json.dumps({"id": number}))])
    document = spec_of(source, tokenizer, packing={"max_tokens": 256}, shuffle_seed=seed)
    segments = pack_document(tmp_path / "store", document).segments
    assert segments[0] == segments[1]
    decoded = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(segments[0][0][0])
    assert str(number) in decoded


def test_what_should_not_pass_unnoticed_is_a_warning(tmp_path: Path) -> None:
    packed = pack_rows(tmp_path, tokens(3, 9, 4), packing={"max_tokens": 8})
    (warning,) = packed.report["warnings"]
    assert "1 of 3 rows (33%) are longer than max_tokens=8 and were cut" in warning


@pytest.mark.parametrize(("overlong", "count", "dropped"), [("truncate", 2, 8), ("drop", 1, 9)])
def test_a_minibatch_that_does_not_fit_is_warned_of_as_such(
    tmp_path: Path, overlong: str, count: int, dropped: int
) -> None:
    packing = {"strategy": "minibatch", "minibatch_size": 3, "max_tokens": 12, "overlong": overlong}
    packed = pack_rows(tmp_path, tokens(2, 3, 4, 9, 9, 2), packing=packing)
    (warning,) = packed.report["warnings"]
    assert f"{count} of 6 rows" in warning
    assert f"{dropped} of 29 tokens dropped" in warning
    assert "not all fit into max_tokens=12" in warning
    assert "Raise packing.max_tokens to 20, which" in warning
    assert "longer than" not in warning
    packing["max_tokens"] = 20
    assert pack_rows(tmp_path / "roomy", tokens(2, 3, 4, 9, 9, 2), packing=packing).report["warnings"] == []
    folder = write_tokenizer(tmp_path / "t2", toy.bundle(chat_template=toy.T2))
    source = write_rows(tmp_path / "chat.jsonl", [toy.chat(("user", "a"), ("assistant", "b"))])
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_of(source, folder)), store=store)
    assert any("<end>" in warning for warning in job.warnings)  # F10: told before any shard is written
    assert pack(job, store, InlineRunner())["warnings"] == list(job.warnings)


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    packed = pack_rows(tmp_path, tokens(3, 4), packing={"max_tokens": 8})
    assert json.loads(json.dumps(packed.report)) == packed.report


def test_a_minibatch_that_is_too_long_is_told_by_file_and_line(tmp_path: Path, monkeypatch: Any) -> None:
    """Not by its place within a partition, of which the user knows nothing."""
    monkeypatch.setattr(sources.cut, "__kwdefaults__", {**sources.cut.__kwdefaults__, "first_bytes": 400})
    rows = tokens(*[2] * 100)
    rows[70], rows[71] = {"input_ids": []}, {"input_ids": [1] * 9}
    paths = [
        write_rows(tmp_path / name, part) for name, part in (("a.jsonl", rows[:50]), ("b.jsonl", rows[50:]))
    ]
    packing = {"strategy": "minibatch", "minibatch_size": 4, "max_tokens": 12, "overlong": "error"}
    with pytest.raises(PackingFailed, match="first mini-batch 17 ") as told:
        pack_document(tmp_path / "store", spec_of([str(path) for path in paths], None, packing=packing))
    text = str(told.value)
    assert "examples 68 to 71 in stream order, from " in text
    assert re.search(r"b\.jsonl, line 19 to .*b\.jsonl, line 22\)", text), text
    assert "with 13 tokens" in text


def test_a_report_tells_the_rows_that_a_cut_left_untrained_and_what_to_do(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, -100, 5]},
        {"input_ids": [1, 2], "labels": [-100, -100]},
        *tokens(2),
    ]
    report = pack_rows(tmp_path, rows, packing={"max_tokens": 4}).report
    assert (report["rows_untrained"], report["rows_untrained_by_cut"]) == (2, 1)
    (said,) = [one for one in report["warnings"] if "lost all that they train" in one]
    assert said.startswith("1 of 3 rows (33%)")
    assert "7 of 9 tokens (78%) were dropped" in said
    for lever in ("--max-tokens", "--overlong split", "--truncate-side left"):
        assert lever in said
    assert report["rows_truncated"] == 0


@pytest.mark.parametrize("packing", [{"overlong": "split"}, {"strategy": "wrapped"}])
def test_rows_that_are_split_already_are_not_told_to_be(tmp_path: Path, packing: dict[str, Any]) -> None:
    """What a row trains may be the first token of a piece, which is never trained."""
    lost = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, -100, 5]}
    report = pack_rows(tmp_path, [lost, *tokens(2)], packing={"max_tokens": 4, **packing}).report
    assert report["rows_untrained_by_cut"] == 1
    (said,) = (one for one in report["warnings"] if "lost all that they train" in one)
    assert said.endswith(": raise packing.max_tokens (--max-tokens)")


def test_one_warning_says_all_of_rows_that_were_cut(tmp_path: Path) -> None:
    lost = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, -100, 5]}
    report = pack_rows(tmp_path, [lost, lost, *tokens(6, 2)], packing={"max_tokens": 4}).report
    assert (report["rows_truncated"], report["rows_untrained_by_cut"], report["rows_packed"]) == (1, 2, 2)
    (said,) = report["warnings"]
    assert said.startswith("3 of 4 rows (75%) are longer than max_tokens=4 and were cut, 2 of them lost all")
    assert "12 of 18 tokens (67%) were dropped" in said


def test_one_warning_says_all_of_mini_batches_that_were_cut(tmp_path: Path) -> None:
    lost = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, -100, 5]}
    packing = {"max_tokens": 8, "strategy": "minibatch", "minibatch_size": 2}
    report = pack_rows(tmp_path, [lost, lost, *tokens(2, 2, 7, 7)], packing=packing).report
    cut = report["rows_truncated"] + report["rows_untrained_by_cut"]
    assert report["rows_untrained_by_cut"] > 0
    (said,) = report["warnings"]
    assert said.startswith(f"{cut} of 6 rows ({cut / 6:.0%}) were cut or left out, ")
    assert f"{report['rows_untrained_by_cut']} of them with all that they train" in said
