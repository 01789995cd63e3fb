"""Bundles and the tokenizer: what is read, what is added, how ids come out."""

import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from packing_job import write_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from packer.store import LocalStore
from packer.tokenization import Bundle, Tokenizer, TokenizerError

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"
# Valid text of all kinds; control words of the example's tokenizer often among it.
texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        st.sampled_from(["<|im_end|>", "<|im_start|>", "e\u0301", "\n\n", "  ", "naïve", "日本", "🙂"]),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def example():
    return Tokenizer(Bundle.read(EXAMPLE))


@pytest.fixture(scope="module")
def backend():
    backend = Backend.from_file(str(EXAMPLE / "tokenizer.json"))
    backend.encode_special_tokens = True
    return backend


def write(bundle, folder):
    folder.mkdir(exist_ok=True)
    for name, data in bundle.files.items():
        (folder / name).write_bytes(data)
    return folder


# ------------------------------------------------------------------ bundle


def test_a_folder_and_a_single_file(tmp_path):
    folder = write(toy.bundle(), tmp_path / "toy")
    (folder / "README.md").write_text("not part of it")
    assert Bundle.read(folder) == toy.bundle()
    alone = Bundle.read(folder / "tokenizer.json")
    assert list(alone.files) == ["tokenizer.json"]
    assert alone.digest != toy.bundle().digest


def test_the_digest_covers_names_and_contents(tmp_path):
    base = toy.bundle()
    renamed = Bundle(files={"tokenizer.json": base.files["tokenizer.json"], "added_tokens.json": b"{}"})
    other = Bundle(files={"tokenizer.json": base.files["tokenizer.json"], "special_tokens_map.json": b"{}"})
    given_text = Bundle.read(write(base, tmp_path / "a"), chat_template="{{ messages }}")
    assert len({base.digest, renamed.digest, other.digest, given_text.digest}) == 4
    (tmp_path / "template.txt").write_text("{{ messages }}")
    given_path = Bundle.read(tmp_path / "a", chat_template=str(tmp_path / "template.txt"))
    assert given_path.digest == given_text.digest
    assert Tokenizer(given_path).chat_templates == {"default": "{{ messages }}"}


def test_through_a_store(tmp_path):
    store = LocalStore(tmp_path)
    digest = toy.bundle().save(store)
    assert Bundle.load(store, digest) == toy.bundle()
    assert toy.bundle().save(store) == digest
    store.put(f"tokenizers/{digest}/tokenizer.json", b"{}")
    with pytest.raises(TokenizerError, match="missing or damaged"):
        Bundle.load(store, digest)
    with pytest.raises(TokenizerError, match="missing or damaged"):
        Bundle.load(store, "0" * 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "there is no such folder or file"),
        (lambda folder: folder, r"must hold a tokenizer.json, found weights.bin"),
        (lambda folder: folder / "weights.bin", "tokenizer.json of .* must be JSON"),
    ],
)
def test_what_is_not_there_is_told(tmp_path, make, message):
    (tmp_path / "weights.bin").write_bytes(b"\x0b\x0a")
    with pytest.raises(TokenizerError, match=message):
        Bundle.read(make(tmp_path))


def test_a_hub_id_without_network_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerError, match="no folder or file 'nobody/nothing' here, and the Hub"):
        Bundle.read("nobody/nothing")


def test_a_relative_path_is_looked_up_in_the_working_folder_then_in_the_roots(monkeypatch, tmp_path):
    for name in ("here", "root"):
        write_tokenizer(tmp_path / name / "tokenizer", toy.bundle(chat_template=name))
    write_tokenizer(tmp_path / "root" / "org" / "name")
    (tmp_path / "root" / "own.jinja").write_text("{{ 'own' }}")
    (tmp_path / "empty").mkdir()
    roots = [tmp_path / "empty", tmp_path / "root"]
    monkeypatch.chdir(tmp_path / "empty")
    wanted = Bundle.read(tmp_path / "root" / "tokenizer")
    assert Bundle.read("tokenizer", roots=roots).files == wanted.files
    assert Bundle.read("org/name", roots=roots).files == toy.bundle().files  # no Hub is asked
    own = Bundle.read("tokenizer", chat_template="own.jinja", roots=roots)
    assert own.files["chat_template.jinja"] == b"{{ 'own' }}"
    monkeypatch.chdir(tmp_path / "here")
    assert Bundle.read("tokenizer", roots=roots).files != wanted.files
    with pytest.raises(
        TokenizerError, match=r"found 'none': .* in the service's working folder or its data fol"
    ):
        Bundle.read("none", roots=roots)
    with pytest.raises(TokenizerError, match="found 'none': there is no such folder or file here"):
        Bundle.read("none")


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"model": 1}', b"\xff"])
def test_files_that_are_no_tokenizer(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(Bundle.read(tmp_path))


# ------------------------------------------------------------------ special tokens


def test_special_ids_of_the_configuration():
    tokenizer = Tokenizer(toy.bundle())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    assert not tokenizer.adds_bos
    assert Tokenizer(toy.bundle(adds_bos=True)).adds_bos
    assert Tokenizer(toy.bundle(config={"add_bos_token": True})).adds_bos
    assert not Tokenizer(toy.bundle(adds_bos=True, config={"add_bos_token": False})).adds_bos
    assert tokenizer.vocab_size == toy.NUM_WORDS


def test_a_bare_file_knows_what_its_post_processor_shows():
    bare = {"tokenizer.json": toy.bundle().files["tokenizer.json"]}
    tokenizer = Tokenizer(Bundle(files=bare))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, None, False)
    bare = {"tokenizer.json": toy.bundle(adds_bos=True).files["tokenizer.json"]}
    tokenizer = Tokenizer(Bundle(files=bare))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, None, True)


def test_truncation_and_padding_of_the_file_are_not_used():
    backend = Backend.from_str(toy.bundle().files["tokenizer.json"].decode())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    files = {**toy.bundle().files, "tokenizer.json": backend.to_str().encode()}
    ids, offsets = Tokenizer(Bundle(files=files)).encode(["a b c d", "a"])
    assert (ids.tolist(), offsets.tolist()) == ([10, 11, 12, 13, 10], [0, 4, 5])


def test_tokens_that_only_the_configuration_knows():
    backend = Backend.from_str(toy.byte_level_bundle().files["tokenizer.json"].decode())
    size = backend.get_vocab_size()
    decoder = {str(size): {"content": "<new>", "special": True, "normalized": False}}
    bundle = toy.byte_level_bundle(
        config={"added_tokens_decoder": decoder, "eos_token": {"content": "<new>"}}
    )
    tokenizer = Tokenizer(bundle)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (size, size + 1)
    assert tokenizer.encode_chats(["x<new>"]).ids[-1] == size
    assert size not in tokenizer.encode(["x<new>"])[0]
    decoder = {"3": {"content": "<new>", "special": True}}
    with pytest.raises(TokenizerError, match="gives '<new>' the id 3"):
        Tokenizer(toy.byte_level_bundle(config={"added_tokens_decoder": decoder}))


def test_a_token_that_the_configuration_names_special_is_a_control_word():
    backend = Backend.from_str(toy.byte_level_bundle().files["tokenizer.json"].decode())
    backend.add_tokens([AddedToken("<turn>", special=False, normalized=False)])
    files = {**toy.byte_level_bundle(config={"eos_token": "<turn>"}).files}
    files["tokenizer.json"] = backend.to_str().encode()
    tokenizer = Tokenizer(Bundle(files=files))
    assert "<turn>" in tokenizer.control_words
    assert tokenizer.eos_id not in tokenizer.encode(["<turn>"])[0]


def test_chat_templates_and_which_goes_first():
    files = {**toy.bundle().files}
    assert Tokenizer(Bundle(files=files)).chat_templates == {"default": toy.T1}
    files["chat_template.json"] = json.dumps({"chat_template": "two"}).encode()
    assert Tokenizer(Bundle(files=files)).chat_templates == {"default": "two"}
    files["chat_template.jinja"] = b"one"
    assert Tokenizer(Bundle(files=files)).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]
    bundle = toy.bundle(chat_template=None, config={"chat_template": named})
    assert Tokenizer(bundle).chat_templates == {"default": "x", "tool_use": "y"}


# ------------------------------------------------------------------ encode


@given(batch=st.lists(texts, max_size=6))
def test_encode_equals_the_library_without_special_tokens(example, backend, batch):
    ids, offsets = example.encode(batch)
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    got = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert got == [backend.encode(text, add_special_tokens=False).ids for text in batch]
    assert not example.is_control[ids].any()
    assert [example.decode(row) for row in got] == batch


@given(batch=st.lists(texts, max_size=6))
def test_places_by_the_table_equal_the_librarys_offsets(example, batch):
    """By bytes; where a character is cut into several tokens the library gives each the whole of it."""
    assert example._token_bytes is not None
    located = example.encode_chats(batch)
    rows = example._located_rows(batch)
    assert located.ids.tolist() == [i for row in rows for i in row[0]]
    base = np.concatenate([[0], np.cumsum([len(text.encode()) for text in batch])])
    starts = np.concatenate([row[1] + base[i] for i, row in enumerate(rows)] or [[]])
    ends = np.concatenate([row[2] + base[i] for i, row in enumerate(rows)] or [[]])
    assert np.all((located.starts >= starts) & (located.ends <= ends))
    assert located.ends.tolist() == located.starts[1:].tolist() + [base[-1]] * bool(len(located.ids))
    data = "".join(batch).encode()
    whole = [data[a:b] for a, b in zip(located.starts, located.ends, strict=True)]
    assert b"".join(whole) == data


def test_the_table_is_not_used_where_tokens_are_not_bytes():
    assert Tokenizer(toy.bundle())._token_bytes is None
    located = Tokenizer(toy.bundle()).encode_chats(["a é b", "c"])
    assert located.ids.tolist() == [10, 8, 11, 12]
    assert (located.starts.tolist(), located.ends.tolist()) == ([0, 2, 5, 6], [1, 4, 6, 7])


def test_many_texts_in_several_calls(example, monkeypatch):
    batch = [f"{i} words " * (i % 7) for i in range(200)]
    wanted = example.encode(batch)
    monkeypatch.setattr("packer.tokenization.tokenizer._CALL_CHARACTERS", 100)
    ids, offsets = example.encode(batch)
    assert np.array_equal(ids, wanted[0])
    assert np.array_equal(offsets, wanted[1])


def _encode_two(tokenizer):
    return [array.tolist() for array in tokenizer.encode(["c d", "a b c"])]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_f35_children_encode_after_the_parent_has(method):
    tokenizer = Tokenizer(toy.bundle())
    tokenizer.encode(["a b", "c", "d e f"])
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        try:
            results = [pool.submit(_encode_two, tokenizer).result(timeout=60) for _ in range(2)]
        except TimeoutError:
            for process in pool._processes.values():  # else leaving the pool would wait for them for ever
                process.kill()
            raise
    assert results == [_encode_two(tokenizer)] * 2
