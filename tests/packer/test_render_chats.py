"""Conversations to ids and masks: the public fault cases, and transformers as the reference."""

import pytest
import toy

from packer.render import Renderer, RenderError
from packer.tokenization import Tokenizer

ROW = toy.chat(("user", "a b"), ("assistant", "c d"))
IDS = [1, 4, 10, 11, 7, 5, 12, 13, 7]
TRAINED = [0, 0, 0, 0, 0, 0, 1, 1, 1]


def renderer(bundle, **options):
    options = {"format": "messages", "fields": {}, **options}
    return Renderer(Tokenizer(bundle), **options)


def rendered(bundle, *rows, **options):
    """(ids, trained as 0 and 1) of each row."""
    out = renderer(bundle, **options).render(rows)
    assert out.errors == []
    stops = out.lengths.cumsum()
    return [
        (out.input_ids[stop - n : stop].tolist(), out.loss_mask[stop - n : stop].astype(int).tolist())
        for stop, n in zip(stops, out.lengths, strict=True)
    ]


def test_f03_completion_mask_per_row():
    second = toy.chat(("user", "e"), ("assistant", "f"))
    assert rendered(toy.bundle(), ROW, second) == [
        (IDS, TRAINED),
        ([1, 4, 14, 7, 5, 15, 7], [0, 0, 0, 0, 0, 1, 1]),
    ]


def test_f09_one_bos_in_chat_and_text():
    bundle = toy.bundle(adds_bos=True)
    assert rendered(bundle, ROW) == [(IDS, TRAINED)]
    assert rendered(bundle, ROW, add_bos=True) == [(IDS, TRAINED)]
    ((ids, _),) = rendered(bundle, {"text": "a b"}, format="text", add_bos=True, add_eos=False)
    assert ids == [1, 10, 11]
