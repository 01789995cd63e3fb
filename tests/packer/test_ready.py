"""Ready ids: many rows at once are the rows one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.render import RowProblem
from packer.render.ready import _quickly, ready_ids, ready_rows

VOCAB = 50
right = st.integers(0, VOCAB - 1)
odd = st.one_of(st.booleans(), st.none(), st.floats(), st.integers(), st.text(max_size=2), st.just(1 << 70))


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(st.lists(st.one_of(right, right, right, odd), max_size=5))
        row: dict[str, Any] = {"input_ids": ids}
        if draw(st.booleans()):
            row["labels"] = [one if draw(st.booleans()) else -100 for one in ids]
            if draw(st.integers(0, 4)) == 0:
                row["labels"] = draw(st.one_of(st.none(), st.just("text"), st.lists(odd, max_size=5)))
        if draw(st.booleans()) and all(type(one) is int and abs(one) < 1 << 31 for one in ids):
            row["input_ids"] = np.array(ids, draw(st.sampled_from([np.int32, np.int64])))
        if draw(st.integers(0, 3)) == 0:
            row["attention_mask"] = [int(draw(st.integers(0, 9)) > 0) for _ in ids]
        found.append(row)
    return found


@given(rows())
def test_equal_to_one_row_after_another(batch: list[dict[str, Any]]) -> None:
    ids, mask, lengths, errors = ready_rows(batch, VOCAB, {})
    assert (ids.dtype, mask.dtype, lengths.dtype) == (np.int32, np.bool_, np.int64)
    places = np.concatenate([[0], np.cumsum(lengths)])
    wrong = dict(errors)
    assert len(lengths) == len(batch)
    for i, row in enumerate(batch):
        part = slice(places[i], places[i + 1])
        try:
            row_ids, row_mask = ready_ids(row, VOCAB, {})
            reason = None
        except RowProblem as problem:
            row_ids, row_mask, reason = ids[:0], mask[:0], str(problem)
        assert wrong.pop(i, None) == reason
        np.testing.assert_array_equal(ids[part], row_ids)
        np.testing.assert_array_equal(mask[part], row_mask)
    assert not wrong


@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_no_ids(value: bool) -> None:
    assert _quickly([{"input_ids": [5, int(value)]}], VOCAB) is not None
    assert _quickly([{"input_ids": [5, value]}], VOCAB) is None


def test_what_is_right_takes_the_short_way() -> None:
    batch = [{"input_ids": [1, 0, 2], "labels": [-100, 0, 2]}, {"input_ids": np.arange(3)}, {"input_ids": []}]
    assert _quickly(batch, VOCAB) is not None
