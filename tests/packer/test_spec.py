"""Specs: every wrong field is named; ids depend on content alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from packer.spec import (
    InputFile,
    Job,
    SpecError,
    canonical_json,
    dataset_id,
    job_from_document,
    job_to_document,
    parse_spec,
)

FULL: dict[str, Any] = {
    "name": "gsm8k-8k",
    "source": {
        "paths": ["data/math.jsonl.gz"],
        "format": "auto",
        "fields": {"prompt": "question", "completion": "answer"},
        "on_bad_row": "fail",
    },
    "tokenizer": {
        "path": "tokenizers/small",
        "revision": None,
        "chat_template": None,
        "add_bos": "auto",
        "add_eos": "auto",
    },
    "loss": "auto",
    "packing": {
        "strategy": "best_fit",
        "max_tokens": 8192,
        "overlong": "truncate",
        "minibatch_size": None,
        "step_size": None,
        "segment_multiple": 1,
        "pack_multiple": 1,
    },
    "shuffle_seed": 0,
}
INPUTS = (InputFile(path="data/math.jsonl.gz", num_bytes=3, digest="ab", reader="jsonl"),)


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(FULL)
    *parents, last = path.split(".")
    inner = document
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return document


def test_the_contracts_example_is_accepted_and_its_values_are_the_defaults() -> None:
    spec = parse_spec(FULL)
    short = parse_spec(
        {
            "name": "gsm8k-8k",
            "source": {"paths": FULL["source"]["paths"], "fields": FULL["source"]["fields"]},
            "tokenizer": {"path": "tokenizers/small"},
        }
    )
    assert spec == short


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("packing.max_tokens", 0, "from 1 to"),
        ("packing.max_tokens", True, "whole number"),
        ("packing.max_tokens", 4096.5, "whole number"),
        ("packing.max_token", 5, "did you mean 'max_tokens'"),
        ("packing.strategy", "bestfit", "did you mean 'best_fit'"),
        ("packing.strategy", "minibatch", "minibatch_size"),
        ("packing.strategy", "step", "step_size"),
        ("packing.segment_multiple", 0, "from 1 to"),
        ("packing.overlong", None, "'truncate'"),
        ("source.paths", [], "at least one"),
        ("source.paths", 5, "list of texts"),
        ("source.paths", [""], "not empty"),
        ("source.fields", {"question": "prompt"}, "left sides are padfree's names"),
        ("source.fields", {"prompt": 1}, "object of texts"),
        ("source", "data.jsonl", "an object is required"),
        ("tokenizer.path", None, "a text"),
        ("tokenizer.add_bos", "yes", '"auto", true or false'),
        ("tokenizer.add_eos", 1, '"auto", true or false'),
        ("loss", "asistant", "did you mean 'assistant'"),
        ("shuffle_seed", "0", "whole number"),
        ("colour", "red", "no such field"),
        ("packing.step_size", 2**63, "from 1 to"),
        ("name", "\ud800", "Unicode"),
        ("name", "team/math", '"/"'),
        ("name", "0123456789abcdef" * 2, "reads as an id"),
        ("name", "..", "neither"),
        ("name", ".", "neither"),
        ("name", " \t ", "printable"),
        ("name", "a\nb", "does not print"),
        ("name", "a\x7f", "does not print"),
        ("name", "n" * 256, "256 characters"),
        ("source.fields", {"input_ids": "a+b"}, "for input_ids; name one field"),
        ("source.fields", {"messages": "m+h"}, 'found "m+h" for messages'),
        ("source.fields", {"input_ids": "a", "labels": "b+c"}, "for labels"),
        ("source.fields", {"messages": "m", "tools": "t+u"}, "for tools"),
        ("packing.max_tokens", [*range(1, 66)], "at most 64 is required, found 65"),
        ("loss", "\ud800", "'assistant'"),
        ("tokenizer.chat_template", "a\0b", "null"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(path, value))
    assert says in str(caught.value)
    if says not in ("minibatch_size", "step_size"):
        assert caught.value.field == path


@pytest.mark.parametrize("document", [None, [], "x", 3, {}, {"source": {}}])
def test_what_is_no_spec_is_told(document: Any) -> None:
    with pytest.raises(SpecError, match="required"):
        parse_spec(document)


def _id(document: dict[str, Any], inputs: tuple[InputFile, ...] = INPUTS, digest: str = "t") -> str:
    return dataset_id(parse_spec(document), inputs=inputs, tokenizer_digest=digest)


def test_an_id_depends_on_content_not_on_names_and_places() -> None:
    same = [
        changed("name", "other"),
        changed("source.paths", ["/elsewhere.jsonl"]),
        changed("tokenizer.path", "x"),
    ]
    assert {_id(document) for document in same} == {_id(FULL)}
    moved = (InputFile(path="other.jsonl", num_bytes=3, digest="ab", reader="jsonl"),)
    assert _id(FULL, moved) == _id(FULL)
    other = [
        _id(changed("packing.max_tokens", 4096)),
        _id(changed("shuffle_seed", 1)),
        _id(changed("shuffle_seed", None)),
        _id(changed("loss", "all")),
        _id(changed("source.fields", {})),
        _id(changed("tokenizer.add_eos", False)),
        _id(FULL, digest="u"),
        _id(FULL, (InputFile(path="data/math.jsonl.gz", num_bytes=3, digest="ac", reader="jsonl"),)),
        _id(FULL, INPUTS * 2),
    ]
    assert len({_id(FULL), *other}) == len(other) + 1


def test_the_id_of_a_spec_is_written_down() -> None:
    # A change here gives every user's dataset another id: raise ENGINE_VERSION on purpose, never so.
    assert _id(FULL) == "8854f6513a396f7bf885f820f073c9df"


def test_capacities_are_said_in_one_way() -> None:
    several = changed("packing.max_tokens", [8192, 2048, 8192])
    assert parse_spec(several).packing.max_tokens == (2048, 8192)
    assert _id(several) == _id(changed("packing.max_tokens", [2048, 8192])) != _id(FULL)
    assert _id(changed("packing.max_tokens", [8192])) == _id(changed("packing.max_tokens", 8192))


@pytest.mark.parametrize("name", ["gsm8k 8k", "Größe…", "c++", "abcd", "a.b", "0123456789abcdef" * 2 + "0"])
def test_names_of_many_kinds_are_accepted(name: str) -> None:
    assert parse_spec(changed("name", name)).name == name


def test_what_an_earlier_release_accepted_can_still_be_read() -> None:
    stored = job_to_document(Job(dataset="d", spec=parse_spec(FULL), inputs=INPUTS, tokenizer_digest="t"))
    stored["spec"]["name"] = "team/math"
    stored["spec"]["source"]["fields"] = {"messages": "m+h"}
    stored["spec"]["packing"]["max_tokens"] = [*range(1, 100)]
    job = job_from_document(stored)
    assert (job.spec.name, len(job.spec.packing.capacities)) == ("team/math", 99)


@pytest.mark.parametrize("max_tokens", [8192, [2048, 8192]])
def test_a_job_survives_its_document(max_tokens: Any) -> None:
    spec = parse_spec(changed("packing.max_tokens", max_tokens))
    job = Job(dataset="d", spec=spec, inputs=INPUTS, tokenizer_digest="t", ignored=("x.bak",))
    assert job_from_document(json.loads(canonical_json(job_to_document(job)))) == job


@pytest.mark.parametrize(
    ("field", "value", "example"),
    [
        ("tokenizer", "/models/small", '{"path": "/models/small"}'),
        ("source", "rows.jsonl", '{"paths": ["rows.jsonl"]}'),
        ("packing", 1024, '{"max_tokens": 8192}'),
    ],
)
def test_where_an_object_is_required_an_example_is_given(field: str, value: Any, example: str) -> None:
    with pytest.raises(SpecError, match="an object is required, found a ") as raised:
        parse_spec({**copy.deepcopy(FULL), field: value})
    assert f"; for example {example}" in str(raised.value)
