"""Train the small tokenizer of examples/tokenizer: byte-level BPE with a ChatML template.

    python examples/train_tokenizer.py TEXT.jsonl.gz … --skip source=sgd,wikipedia --out examples/tokenizer

Reads every text in the given JSON Lines files (plain or .gz): each string of a row's fields `text`,
`prompt`, `completion`, `question`, `answer` and of its messages' `content`. Deterministic: the same
files in the same order give the same tokenizer.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SPECIAL = [
    PAD,
    BOS,
    EOS,
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
# Words, numbers of up to three digits, punctuation, line breaks: the split of today's vocabularies.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
FIELDS = ("text", "prompt", "completion", "question", "answer")

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools you may call, one JSON schema a line:\\n' }}
    {%- for tool in tools %}
        {{- (tool.function if tool.function else tool) | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first and tools %}
        {#- printed above #}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {%- set call = call.function or call %}
                {{- '<tool_call>{"name": ' + call.name | tojson }}
                {{- ', "arguments": ' + call.arguments | tojson + '}</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def read_texts(path: Path, skip: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """The texts of a file, without rows of which a field begins with one of the values of `skip`."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if any(str(row.get(name)).startswith(values) for name, values in skip.items()):
                continue
            yield from (row[name] for name in FIELDS if isinstance(row.get(name), str))
            for message in row.get("messages", ()):
                if isinstance(message.get("content"), str):
                    yield message["content"]


def limited(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    """The first texts, up to `num_characters` of them all: no file may outweigh the others."""
    for text in texts:
        if num_characters <= 0:
            return
        yield text[:num_characters]
        num_characters -= len(text)


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer that begins every text with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(word, normalized=False, special=True) for word in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files of a tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("examples/tokenizer"))
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--limit", type=int, default=10_000_000, help="characters of each file")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="leave out rows whose field begins with A or B",
    )
    arguments = parser.parse_args()
    parts = [text.partition("=") for text in arguments.skip]
    skip = {name: tuple(values.split(",")) for name, _, values in parts}
    texts = (text for path in arguments.paths for text in limited(read_texts(path, skip), arguments.limit))
    tokenizer = train(texts, arguments.vocab_size)
    save(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} tokens in {arguments.out}")


if __name__ == "__main__":
    main()
