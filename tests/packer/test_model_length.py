"""Segments that are longer than the tokenizer says its model takes: packed, and warned of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import toy
from packing_job import pack_document, packing_of, spec_of, write_rows, write_tokenizer

from packer.coordinator import pack
from packer.preview import preview
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.spec import parse_spec
from packer.store import LocalStore
from padfree.cli import main

# 3, 5 and 9 tokens with EOS.
ROWS = [{"text": "a b"}, {"text": "a b c d"}, {"text": "a b c d e f g h"}]


def spec_for(tmp_path: Path, length: Any, **more: Any) -> dict[str, Any]:
    bundle = toy.bundle(config={"model_max_length": length})
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    return spec_of(file, write_tokenizer(tmp_path / "tokenizer", bundle), **more)


def told(warnings: list[str]) -> list[str]:
    return [one for one in warnings if "model_max_length" in one]


@pytest.mark.parametrize(
    ("length", "packing", "said"),
    [
        (4, {"max_tokens": 8}, "2 segments are longer .*model_max_length 4"),
        (8, {"max_tokens": 64}, "1 segment is longer .*model_max_length 8"),
        (8.0, {"max_tokens": 64}, "1 segment is longer .*model_max_length 8"),
        (4, {"max_tokens": 8, "overlong": "drop"}, "1 segment is longer"),
        (9, {"max_tokens": 64}, None),  # a pack may be longer: positions begin anew in each segment
        (4, {"max_tokens": 4}, None),
        (10**30, {"max_tokens": 64}, None),
        (None, {"max_tokens": 64}, None),
        (True, {"max_tokens": 64}, None),
        ("8", {"max_tokens": 64}, None),
    ],
)
def test_report_preview_and_estimate_warn_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: Any, packing: dict[str, Any], said: str | None
) -> None:
    spec = spec_for(tmp_path, length, packing=packing)
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec), store=store)
    found = [told(preview(job, store, 1).warnings), told(pack(job, store, InlineRunner())["warnings"])]
    options = [
        *("--tokenizer", str(tmp_path / "tokenizer"), "--max-tokens", str(packing["max_tokens"])),
        *("--overlong", packing.get("overlong", "truncate")),
    ]
    assert main(["estimate", str(tmp_path / "rows.jsonl"), *options, "--json"]) == 0
    found.append(told(json.loads(capsys.readouterr().out.splitlines()[-1])["warnings"]))
    for warnings in found:
        assert len(warnings) == (said is not None)
    if said is not None:
        assert found[0] == found[1] == found[2]
        assert re.search(said, found[0][0])


def test_pieces_are_counted_as_they_are_packed(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, 4, packing=packing_of("wrapped", 5, group=1))
    found = pack_document(tmp_path / "store", spec)
    longer = sum(len(ids) > 4 for segments in found.segments.values() for ids, _ in segments)
    (warning,) = told(found.report["warnings"])
    assert warning.startswith(f"{longer:,} segment")


def test_a_dataset_that_is_packed_anew_knows_the_length(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, 4, packing={"max_tokens": 16})
    first = pack_document(tmp_path / "store", spec)
    again = {"source": {"paths": [f"dataset://{first.job.dataset}"]}, "packing": {"max_tokens": 32}}
    found = pack_document(tmp_path / "store", again).report["warnings"]
    assert told(found) == told(first.report["warnings"]) != []
