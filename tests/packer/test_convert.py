"""Tokenizer files other than tokenizer.json: the ids of the libraries that they were made for.

tests/golden/foreign/make.py made the small models and, with those libraries, their ids.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from tokenizers import Tokenizer as Backend

from packer.render import Renderer
from packer.store import LocalStore
from packer.tokenization import Bundle, Tokenizer, TokenizerError
from packer.tokenization.convert.ranks import byte_characters, last_pair, merges_of
from packer.tokenization.convert.sentencepiece import _merges
from packer.tokenization.convert.tiktoken import check_pattern, is_tiktoken
from packer.tokenization.convert.values import ConversionError

FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"
IDS: dict[str, list[list[int]]] = json.loads((FOREIGN / "ids.json").read_text())
EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def folder_with(tmp_path: Path, files: dict[str, Any]) -> Path:
    """A folder of these files: bytes, or what JSON is to be made of."""
    tmp_path.mkdir(exist_ok=True)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return tmp_path


def model(name: str) -> bytes:
    return (FOREIGN / name).read_bytes()


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    ids, offsets = tokenizer.encode(texts)
    return [ids[start:stop].tolist() for start, stop in pairwise(offsets.tolist())]


def texts() -> list[str]:
    source = (FOREIGN / "make.py").read_text()
    namespace: dict[str, Any] = {}
    start = source.index("TEXTS = [")
    exec(source[start : source.index("\n]\n", start) + 3], namespace)
    found: list[str] = namespace["TEXTS"]
    return found


def assert_golden(tokenizer: Tokenizer, name: str) -> None:
    found = dict(zip(texts(), ids_of(tokenizer, texts()), strict=True))
    assert found == dict(zip(texts(), IDS[name], strict=True))


# ------------------------------------------------------------------ SentencePiece


@pytest.mark.parametrize("name", ["llama", "gemma", "tidy"])
def test_a_sentencepiece_model_gives_the_ids_of_its_library(name: str) -> None:
    tokenizer = Tokenizer(Bundle.read(FOREIGN / f"{name}.model"))
    assert_golden(tokenizer, name)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)
    assert tokenizer.control_words["</s>"] == 2


@pytest.mark.parametrize("name", ["unigram", "unigram-bytes"])
def test_a_unigram_model_is_encoded_by_its_library(name: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    bundle = Bundle.read(FOREIGN / f"{name}.model", chat_template=LLAMA_TEMPLATE)
    store = LocalStore(tmp_path)
    tokenizer = Tokenizer(Bundle.load(store, bundle.save(store)))
    assert_golden(tokenizer, name)
    assert tokenizer.encoder_name == f"sentencepiece {sentencepiece.__version__}"
    assert pickle.loads(pickle.dumps(tokenizer)).bundle == bundle
    row = toy.chat(("user", "hi </s>"), ("assistant", "naïve 🙂 yes"))
    rendered = Renderer(tokenizer, format="messages", fields={}).render([row])
    answer = ids_of(tokenizer, [" naïve 🙂 yes"])[0]
    trained = rendered.input_ids[rendered.loss_mask].tolist()
    assert trained[-1] == tokenizer.eos_id
    # The space before the answer stands in one text with "[/INST]", which is no control word here.
    assert tokenizer.decode(trained[:-1]).strip() == tokenizer.decode(answer).strip()
    assert rendered.input_ids.tolist().count(tokenizer.eos_id or 0) == 1


def test_places_by_the_library_cover_the_text(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    tokenizer = Tokenizer(Bundle.read(FOREIGN / "unigram-bytes.model"))
    located = tokenizer.encode_chats(["<s>é 🙂</s>", "", "a"])
    assert (located.starts[0], located.ends[0]) == (0, 3)
    assert located.ends.max() == len("<s>é 🙂</s>a".encode())
    assert np.all(located.ends > located.starts)
    face = np.flatnonzero((located.starts < 10) & (located.ends > 6))
    assert len(face) == 4  # bytes that share the character


def test_without_the_library_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(TokenizerError, match="pip install sentencepiece"):
        Tokenizer(Bundle.read(FOREIGN / "unigram.model"))


def test_decoding_gives_the_text_back() -> None:
    tokenizer = Tokenizer(Bundle.read(FOREIGN / "llama.model"))
    for text in texts():
        if "▁" not in text:  # which stands for a space
            assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text


def test_a_folder_of_transformers_with_a_model_alone(tmp_path: Path) -> None:
    """What its configuration says goes before what the model says."""
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "eos_token": "[/INST]"}
    folder = folder_with(
        tmp_path / "a",
        {
            "tokenizer.model": model("llama.model"),
            "tokenizer_config.json": config | {"chat_template": LLAMA_TEMPLATE},
            "added_tokens.json": {"<extra>": Tokenizer(Bundle.read(FOREIGN / "llama.model")).vocab_size},
        },
    )
    tokenizer = Tokenizer(Bundle.read(folder))
    assert_golden(tokenizer, "llama")
    assert (tokenizer.adds_bos, tokenizer.token(tokenizer.eos_id or 0)) == (False, "[/INST]")
    assert tokenizer.chat_templates == {"default": LLAMA_TEMPLATE}


def test_in_chats_control_words_cut_the_text_and_what_is_between_is_encoded_as_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(Bundle.read(FOREIGN / "llama.model", chat_template=LLAMA_TEMPLATE))
    row = {"messages": [{"role": "user", "content": "naïve </s>?"}, {"role": "assistant", "content": "Yes."}]}
    rendered = Renderer(tokenizer, format="messages", fields={}).render([row])
    control = tokenizer.control_words
    question, answer, _ = (ids_of(tokenizer, [text])[0] for text in (" naïve ", " Yes.", ""))
    end = tokenizer.encode_plain_word("</s>").tolist()
    mark = ids_of(tokenizer, ["?"])[0]
    ids = rendered.input_ids.tolist()
    assert ids[:2] == [control["<s>"], control["[INST]"]]
    assert ids[2 : 2 + len(question) + len(end)] == question + end
    assert ids[-len(answer) - 1 :] == [*answer, control["</s>"]]
    assert rendered.loss_mask.tolist() == [False] * (len(ids) - len(answer) - 1) + [True] * (len(answer) + 1)
    assert ids.count(control["</s>"]) == 1
    assert mark[-1] in ids


def test_legacy_false_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Then a control word cuts no text: what follows it gets no space of its own."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentencepiece")
    folder = folder_with(
        tmp_path / "a",
        {
            "tokenizer.model": model("llama.model"),
            "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False},
        },
    )
    tokenizer, true = Tokenizer(Bundle.read(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    text = "<s>[INST]a b[/INST] c</s>"
    assert tokenizer.encode_chats([text]).ids.tolist() == true(text, add_special_tokens=False).input_ids


def test_legacy_false_gives_one_space_at_the_beginning(tmp_path: Path) -> None:
    files = {"tokenizer.model": model("llama.model"), "tokenizer_config.json": {"legacy": False}}
    joined = Tokenizer(Bundle.read(folder_with(tmp_path / "a", files)))
    apart = Tokenizer(Bundle.read(FOREIGN / "llama.model"))
    pieces = [joined.token(i) for i in joined.encode_chats(["[INST]a"]).ids.tolist()]
    assert pieces == ["[INST]", "a"]
    assert [apart.token(i) for i in apart.encode_chats(["[INST]a"]).ids.tolist()] == ["[INST]", "▁a"]
    assert ids_of(joined, ["Hello world"]) == ids_of(apart, ["Hello world"])


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        (
            "llama",
            {"tokenizer_class": "XLMRobertaTokenizer"},
            "XLMRobertaTokenizer changes what the model gives",
        ),
        ("tidy", {"legacy": False}, "takes surplus spaces out"),
    ],
)
def test_models_that_cannot_be_carried_over_are_refused(
    name: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    files = {"tokenizer.model": model(f"{name}.model"), "tokenizer_config.json": config}
    with pytest.raises(TokenizerError, match=reason):
        Bundle.read(folder_with(tmp_path / "a", files))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    for data in (b"\n\x03abc", b"\nplain text\n", model("llama.model")[:-5]):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(TokenizerError, match=r"tokenizer.model: .*copy the file again"):
            Bundle.read(tmp_path)


# ------------------------------------------------------------------ ranks


def small_config(**more: Any) -> dict[str, Any]:
    return {
        "pat_str": PATTERN,
        "added_tokens_decoder": {"600": {"content": "<|end|>", "special": True}},
        "eos_token": "<|end|>",
        **more,
    }


def test_a_tiktoken_file_gives_the_ids_of_tiktoken(tmp_path: Path) -> None:
    for name in ("small.tiktoken", "tokenizer.model"):
        files = {name: model("small.tiktoken"), "tokenizer_config.json": small_config()}
        tokenizer = Tokenizer(Bundle.read(folder_with(tmp_path / name, files)))
        assert_golden(tokenizer, "tiktoken")
        assert (tokenizer.eos_id, tokenizer.adds_bos) == (600, False)
        assert tokenizer.encode_chats(["a<|end|>"]).ids.tolist()[-1] == 600
        assert tokenizer._token_bytes is not None  # masks take the fast way


def test_special_tokens_may_have_any_free_id(tmp_path: Path) -> None:
    """cl100k_base leaves out ids."""
    tokens = {"607": {"content": "<|end|>", "special": True}}
    files = {
        "a.tiktoken": model("small.tiktoken"),
        "tokenizer_config.json": small_config(added_tokens_decoder=tokens),
    }
    tokenizer = Tokenizer(Bundle.read(folder_with(tmp_path / "a", files)))
    assert_golden(tokenizer, "tiktoken")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (607, 608)
    files["tokenizer_config.json"]["added_tokens_decoder"] = {"599": tokens["607"]}
    with pytest.raises(TokenizerError, match="an id and a text of its own"):
        Bundle.read(folder_with(tmp_path / "b", files))


def test_a_tiktoken_file_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"number of ranks, 600, .*Llama 3 \(128,000\).*pat_str"):
        Bundle.read(FOREIGN / "small.tiktoken")
    lines = model("small.tiktoken").splitlines(keepends=True)
    for broken, reason in (
        ([*lines, b"no rank\n"], "line 601 must be a token"),
        ([*lines, lines[7]], "there once, found some twice"),
        (lines[:255] + lines[256:], "found none for 1 of them"),
    ):
        files = {"a.tiktoken": b"".join(broken), "tokenizer_config.json": small_config()}
        with pytest.raises(TokenizerError, match=reason):
            Bundle.read(folder_with(tmp_path, files))


MALFORMED = [
    [1],
    "text",
    {"x": {"content": "<s>"}},
    {"-1": {"content": "<s>"}},
    {"9" * 5000: {"content": "<s>"}},
    {"600": "<s>"},
    {"600": {"content": 5}},
    {"600": {}},
]


@pytest.mark.parametrize("tokens", MALFORMED)
@pytest.mark.parametrize("kind", ["tiktoken", "tokenizer.json"])
def test_added_tokens_that_are_malformed_are_told_by_file_and_field(
    tmp_path: Path, kind: str, tokens: Any
) -> None:
    files: dict[str, Any] = {"a.tiktoken": model("small.tiktoken")}
    config = json.loads(json.dumps(small_config(added_tokens_decoder=tokens)))
    if kind == "tokenizer.json":
        files, config = {**toy.bundle().files}, {"added_tokens_decoder": tokens}
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: added_tokens_decoder: ids with their"):
        Tokenizer(Bundle.read(folder_with(tmp_path, {**files, "tokenizer_config.json": config})))


def test_an_added_token_with_a_wrong_field_is_told(tmp_path: Path) -> None:
    tokens = {"600": {"content": "<s>", "lstrip": "yes"}}
    files = {**toy.bundle().files, "tokenizer_config.json": {"added_tokens_decoder": tokens}}
    with pytest.raises(TokenizerError, match=r"added_tokens_decoder: token 600 must be"):
        Tokenizer(Bundle.read(folder_with(tmp_path, files)))


@pytest.mark.parametrize("ids", [{"a": "x"}, {"a": None}, {"a": [1]}, {"a": True}, {"a": -1}, {"a": 10**12}])
def test_ids_that_are_none_are_told_by_their_file(tmp_path: Path, ids: Any) -> None:
    files = {**toy.bundle().files, "added_tokens.json": ids}
    with pytest.raises(TokenizerError, match=r"added_tokens.json: tokens with their ids, .* found 'a'"):
        Tokenizer(Bundle.read(folder_with(tmp_path / "added", files)))
    config = {"tokenizer_class": "GPT2Tokenizer"}
    files = {"vocab.json": ids, "merges.txt": b"", "tokenizer_config.json": config}
    with pytest.raises(TokenizerError, match=r"vocab.json: tokens with their ids"):
        Bundle.read(folder_with(tmp_path / "slow", files))


def test_merges_that_are_no_text_are_told(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer"}
    files = {"vocab.json": {"a": 1}, "merges.txt": b"\xff a", "tokenizer_config.json": config}
    with pytest.raises(TokenizerError, match=r"merges.txt must be UTF-8"):
        Bundle.read(folder_with(tmp_path, files))


@pytest.mark.parametrize("pattern", ["(", 5, None, ["a"]])
def test_what_is_no_expression_is_told(tmp_path: Path, pattern: Any) -> None:
    files = {"a.tiktoken": model("small.tiktoken"), "tokenizer_config.json": small_config(pat_str=pattern)}
    with pytest.raises(TokenizerError, match=r"pat_str of tokenizer_config.json: a regular expression"):
        Bundle.read(folder_with(tmp_path, files))


@pytest.mark.parametrize("pattern", [r"\p{L}++", r"\p{N}{1,3}+", r"a?+", r"\s+$", "^a"])
def test_expressions_that_the_libraries_read_each_in_its_way_are_refused(pattern: str) -> None:
    with pytest.raises(ConversionError, match="possessive"):
        check_pattern(pattern, "pat_str")


def test_usual_expressions_are_taken() -> None:
    for pattern in (PATTERN, r"[^\s]+\$|\p{L}+|\++", r"[^\r\n]?\p{Lu}+"):
        check_pattern(pattern, "pat_str")


def tekken(**more: Any) -> dict[str, Any]:
    """A tekken.json of the small ranks, with 20 special tokens, of which 4 are listed."""
    ranks = [line.split() for line in model("small.tiktoken").splitlines()]
    listed = ["<unk>", "<s>", "</s>", "[INST]"]
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": 700,
            "default_vocab_size": 620,
            "default_num_special_tokens": 20,
            "version": "v11",
        },
        "vocab": [
            *({"rank": int(rank), "token_bytes": token.decode(), "token_str": None} for token, rank in ranks),
            # Behind what the vocabulary's size leaves room for.
            {"rank": 600, "token_bytes": base64.b64encode(b"Hello world").decode(), "token_str": None},
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(listed)
        ],
        **more,
    }


def test_a_tekken_file_gives_ranks_behind_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(Bundle.read(folder_with(tmp_path, {"tekken.json": tekken()})))
    assert ids_of(tokenizer, texts()) == [[20 + rank for rank in ids] for ids in IDS["tiktoken"]]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos, tokenizer.vocab_size) == (1, 2, True, 620)
    assert tokenizer.encode_chats(["<s>[INST]"]).ids.tolist() == [1, 3]
    assert tokenizer.control_words["<SPECIAL_19>"] == 19
    alone = Tokenizer(Bundle.read(tmp_path / "tekken.json"))
    assert alone.bundle == tokenizer.bundle
    with pytest.raises(ValueError, match="requires a chat template"):  # it holds none
        Renderer(tokenizer, format="messages", fields={})


def test_a_tekken_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    whole = tekken()
    for broken, reason in (
        (whole | {"vocab": whole["vocab"][:-9]}, "must hold ranks 0 to 599"),
        (whole | {"config": whole["config"] | {"default_vocab_size": 10**12}}, "must hold ranks 0 to"),
        (whole | {"config": whole["config"] | {"default_num_special_tokens": 10**12}}, "is not as"),
        (whole | {"config": whole["config"] | {"default_vocab_size": float("inf")}}, "is not as"),
        (whole | {"config": whole["config"] | {"default_vocab_size": []}}, "is not as"),
        (whole | {"config": whole["config"] | {"pattern": "("}}, "a regular expression is required"),
        (whole | {"config": whole["config"] | {"pattern": 5}}, "a regular expression is required"),
        (whole | {"special_tokens": {"a": 1}}, "is not as"),
        (whole | {"special_tokens": [5]}, "is not as"),
        (whole | {"vocab": [{}]}, "is not as mistral-common reads it"),
        ({"config": {}}, "config with a pattern"),
    ):
        with pytest.raises(TokenizerError, match=reason):
            Bundle.read(folder_with(tmp_path, {"tekken.json": broken}))


def test_merges_are_the_last_pairs() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cab": 6, b"xyz": 7}
    # "abc" comes of "bc" first, since that has the lower rank; "xyz" comes of nothing.
    assert merges_of(ranks) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"c", b"ab")]
    assert last_pair([*"xyz"], {}) is None
    assert len(set(byte_characters())) == 256
    assert is_tiktoken(model("small.tiktoken"))
    assert not is_tiktoken(b"plain text 5\n")


def test_a_token_that_merging_does_not_come_to_is_given_for_a_whole_piece(tmp_path: Path) -> None:
    """As tiktoken does, which looks a piece up before it merges."""
    ranks = model("small.tiktoken") + base64.b64encode(b"qzqzq") + b" 600\n"
    tokens = {"601": {"content": "<|end|>", "special": True}}
    files = {"a.tiktoken": ranks, "tokenizer_config.json": small_config(added_tokens_decoder=tokens)}
    tokenizer = Tokenizer(Bundle.read(folder_with(tmp_path, files)))
    whole, longer = ids_of(tokenizer, ["qzqzq", "qzqzqz"])
    assert whole == [600]
    assert 600 not in longer


def test_runs_of_one_score_are_listed_with_the_longest_first() -> None:
    """Llama's runs of spaces; the library lets the leftmost grow. Other pieces of one score are refused."""
    spaces = [("▁" * n, -1e9, 1) for n in (2, 3, 4)]
    assert _merges([("▁", -3.0, 1), *spaces], "a", whole=False) == [("▁▁▁", "▁"), ("▁▁", "▁"), ("▁", "▁")]
    letters = [(letter, -3.0, 1) for letter in "abc"]
    with pytest.raises(ConversionError, match="have one score"):
        _merges([*letters, ("ab", -5.0, 1), ("bc", -5.0, 1)], "a", whole=False)


# ------------------------------------------------------------------ vocab.json and merges.txt


def slow_files(**config: Any) -> dict[str, Any]:
    backend = json.loads((EXAMPLE / "tokenizer.json").read_text())["model"]
    merges = "\n".join(
        ["#version: 0.2", *(p if isinstance(p, str) else " ".join(p) for p in backend["merges"])]
    )
    return {"vocab.json": backend["vocab"], "merges.txt": merges.encode(), "tokenizer_config.json": config}


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "CodeGenTokenizer", "Qwen2Tokenizer"])
def test_vocabulary_and_merges_are_what_transformers_makes_of_them(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ends = {"eos_token": "<|im_end|>", "bos_token": "<|im_end|>", "unk_token": "<|im_end|>"}
    folder = folder_with(tmp_path / "a", slow_files(tokenizer_class=name, **ends))
    tokenizer = Tokenizer(Bundle.read(folder))
    true = getattr(transformers, name).from_pretrained(folder)
    assert ids_of(tokenizer, texts()) == [
        true(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in texts()
    ]
    assert tokenizer.eos_id == true.eos_token_id


def test_vocabulary_and_merges_alone_do_not_say_how_texts_are_split(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"do not say how texts are split.*found none"):
        Bundle.read(folder_with(tmp_path, slow_files()))
    files = slow_files(tokenizer_class="GPT2Tokenizer") | {"merges.txt": b"a b\nc\n"}
    with pytest.raises(TokenizerError, match=r"merges.txt: line 2"):
        Bundle.read(folder_with(tmp_path, files))


# ------------------------------------------------------------------ all


def test_a_tokenizer_json_goes_first(tmp_path: Path) -> None:
    files = {"tekken.json": tekken(), "tokenizer.model": b"broken", **toy.bundle().files}
    assert Bundle.read(folder_with(tmp_path, files)) == toy.bundle()


def test_which_of_two_is_meant_has_to_be_said(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"a.tiktoken": b"", "b.tiktoken": b""})
    with pytest.raises(TokenizerError, match="one file"):
        Bundle.read(folder)


def test_converting_again_gives_equal_bytes() -> None:
    first, again = (Bundle.read(FOREIGN / "llama.model") for _ in range(2))
    assert first.digest == again.digest
    Backend.from_str(first.files["tokenizer.json"].decode())


def test_where_the_library_is_there_its_ids_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that gives other ids is refused."""
    import packer.tokenization.convert.sentencepiece as module

    monkeypatch.setattr(module, "_reference", lambda data: lambda texts: [[0] for _ in texts])
    with pytest.raises(TokenizerError, match="the converted tokenizer gives the ids"):
        Bundle.read(FOREIGN / "llama.model")


@pytest.mark.parametrize("name", ["llama", "gemma", "tidy"])
def test_sentencepiece_itself(name: str) -> None:
    """On the trial texts, and runs of all lengths of what may be merged in several ways."""
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(FOREIGN / f"{name}.model"))
    tokenizer = Tokenizer(Bundle.read(FOREIGN / f"{name}.model"))
    runs = [character * n for character in "a =\n▁é" for n in range(1, 70)]
    assert ids_of(tokenizer, runs) == processor.encode(runs, out_type=int)
