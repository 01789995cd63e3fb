"""Makes the small models in this folder, and ids.json: what the libraries they are for give for TEXTS.

Run by hand, with sentencepiece 0.2 and tiktoken 0.14 installed: python tests/golden/foreign/make.py
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import sentencepiece
import tiktoken
from tiktoken._educational import bpe_train

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_RANKS = 600

# Options of the trainer.
MODELS = {
    # As Llama 2 and Mistral.
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "control_symbols": ["[INST]", "[/INST]"],
    },
    # As Gemma: no dummy prefix, pieces that the user defined.
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n\n", "▁▁", "<table>", "<start>", "ab", "abc"],
    },
    # A dummy prefix, pieces that the user defined, and unknown tokens instead of bytes.
    "tidy": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": True,
        "user_defined_symbols": ["<sep>", "=="],
    },
    # What the trainer does where nothing else is said: characters are changed too.
    "unigram": {"model_type": "unigram"},
    "unigram-bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n\n"],
    },
}

TEXTS = [
    "Hello world, how are you?",
    "  two spaces,   three, and some at the end   ",
    " a",
    "",
    " ",
    "\n\n\n",
    "a\n\nb\n\n\n\nc\td",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 70 + "x" + " " * 7,
    "=" * 33 + "<sep>==<sep> == ",
    "abcabababcab <table>x</table> <start>",
    "▁▁a▁ ▁",
    "naïve café, e\u0301 and ﬁ, Å ℌ ①",
    "日本語のテキスト、漢字。 한국어 각",
    "🙂🙂 👨\u200d👩\u200d👧 🇩🇪",
    "<s> </s> <unk> <0x0A> [INST] hi [/INST] <pad>",
    "</s>",
    "<0x0A>",
    "==</s>\n\n<0x0A>",
    "def f(x):\n    return x ** 2\r\n",
    "12345 3.14 1,000,000 0x1F x² ١٢٣",
    "\x00\x01\x7f\xa0\u2028\ufeff",
    "It's we'll I'M don’t",
]


def corpus() -> list[str]:
    """Text of the project: its documents."""
    return [line for path in sorted(ROOT.glob("docs/*.md")) for line in path.read_text().splitlines()]


def main() -> None:
    ids: dict[str, list[list[int]]] = {}
    for name, options in MODELS.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()),
            model_prefix=str(HERE / name),
            vocab_size=640,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
            **options,
        )
        (HERE / f"{name}.vocab").unlink()
        processor = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"{name}.model"))
        ids[name] = processor.encode(TEXTS, out_type=int)
    ranks = bpe_train("\n".join(corpus()), NUM_RANKS, PATTERN, visualise=None)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (HERE / "small.tiktoken").write_text("".join(lines))
    encoding = tiktoken.Encoding(name="small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ids["tiktoken"] = [encoding.encode_ordinary(text) for text in TEXTS]
    (HERE / "ids.json").write_text(json.dumps(ids) + "\n")


if __name__ == "__main__":
    main()
