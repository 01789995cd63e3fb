"""Any bytes, any structure: no crash, no row that is not counted, no error without a reason."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_job import write_tokenizer

from packer import sources
from packer.coordinator import PackingFailed, pack
from packer.manifest import Manifest
from packer.render import RenderError
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.shard import read_packs
from packer.spec import SpecError, parse_spec
from packer.store import LocalStore
from packer.tokenization import TokenizerError

TOLD = (SpecError, sources.SourceError, TokenizerError, RenderError, PackingFailed)

words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["a b", "<end>", "<asst> w40", "", " ", "\ufdd5x", "\ud800", "naïve", "\0", "w36\nw37"]),
)
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
calls = st.lists(
    st.one_of(
        junk,
        st.fixed_dictionaries(
            {
                "function": st.fixed_dictionaries(
                    {"name": words, "arguments": st.one_of(junk, st.just('{"a": 1}'))}
                )
            }
        ),
    ),
    max_size=2,
)
message = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "odd"]), "content": words},
        optional={"train": st.one_of(st.booleans(), junk), "tool_calls": calls, "reasoning_content": words},
    ),
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "x"]), "value": st.one_of(words, junk)}),
    junk,
)
ids = st.lists(st.one_of(st.integers(0, toy.NUM_WORDS - 1), st.integers(-2, 1 << 33), junk), max_size=6)
row = st.one_of(
    st.fixed_dictionaries({"text": st.one_of(words, junk)}),
    st.fixed_dictionaries({"prompt": st.one_of(words, junk), "completion": st.one_of(words, junk)}),
    st.fixed_dictionaries(
        {"messages": st.one_of(st.lists(message, max_size=4), junk)}, optional={"tools": junk}
    ),
    st.fixed_dictionaries({"input_ids": st.one_of(ids, junk)}, optional={"labels": st.one_of(ids, junk)}),
    junk,
)
line = st.one_of(
    row.map(lambda value: json.dumps(value).encode()),
    row.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")),
    row.map(lambda value: json.dumps(value).encode()[:-1]),
    st.binary(max_size=20),
    st.just(b"   "),
)
packings = st.one_of(
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(2, 16),
            "overlong": st.sampled_from(["truncate", "split", "drop"]),
            "strategy": st.sampled_from(["best_fit", "sequential", "wrapped", "padded"]),
            "segment_multiple": st.sampled_from([1, 2]),
        }
    ),
    st.just({"max_tokens": 32, "strategy": "step", "step_size": 2}),
)
jobs = st.fixed_dictionaries(
    {
        "lines": st.lists(line, max_size=8),
        "format": st.sampled_from(["auto", "text", "prompt_completion", "messages", "tokens"]),
        "packing": packings,
        "seed": st.sampled_from([None, 3]),
        "loss": st.sampled_from(["auto", "auto", "all", "last_assistant"]),
        "template": st.sampled_from([toy.T1, toy.T1_UNMARKED_PROMPT]),
    }
)


def check(root: Path, job_of: dict[str, Any]) -> None:
    data = b"\n".join(job_of["lines"])
    num_rows = sum(
        bool(part) and not part.isspace() for part in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    )
    (root / "rows.jsonl").write_bytes(data)
    tokenizer = write_tokenizer(root / "tokenizer", toy.bundle(chat_template=job_of["template"]))
    store = LocalStore(root / "store")
    document = {
        "source": {
            "paths": [str(root / "rows.jsonl")],
            "format": job_of["format"],
            "on_bad_row": "skip",
        },
        "tokenizer": {"path": str(tokenizer)},
        "loss": job_of["loss"],
        "packing": job_of["packing"],
        "shuffle_seed": job_of["seed"],
    }
    reason = ""
    try:
        job = resolve(parse_spec(document), store=store)
        report = pack(job, store, InlineRunner())
    except TOLD as error:
        reason = str(error)
    if reason:
        assert len(reason) > 20
        assert not reason.startswith("unexpected")
        return
    assert report["rows_in"] == num_rows
    left = report["rows_empty"] + report["rows_overlong"] + report["rows_rejected"] + report["rows_untrained"]
    assert report["rows_in"] == report["rows_packed"] + left
    assert (
        report["tokens_in"] + report["tokens_padding"] == report["tokens_packed"] + report["tokens_dropped"]
    )
    assert len(report["rejected"]) == report["rows_rejected"]
    for one in report["rejected"]:
        assert one["line"] >= 1
        assert len(one["reason"]) > 10
    manifest = Manifest(store, job.dataset)
    manifest.refresh()
    packs = [one for shard in manifest.shards for one in read_packs(store.get(shard.key))]
    examples = {i for one in packs for i in one.example_ids.tolist()} - {-1}
    # Only "wrapped" leaves a row where it is that its cuts left nothing to train.
    stay = report["rows_untrained"] if job_of["packing"].get("strategy") == "wrapped" else 0
    assert report["rows_packed"] <= len(examples) <= report["rows_packed"] + stay
    assert examples <= set(range(num_rows))
    assert sum(int(np.count_nonzero(one.loss_mask)) for one in packs) == report["tokens_trained"]


def run(job_of: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        check(Path(root), job_of)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(jobs)
def test_any_input_is_packed_or_told(job_of: dict[str, Any]) -> None:
    run(job_of)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(jobs)
def test_ten_thousand_inputs_are_packed_or_told(job_of: dict[str, Any]) -> None:
    run(job_of)
