"""What a user asks for: frozen values, checked once at the border, and the dataset's id.

`parse_spec` turns a JSON document (the body of POST /v1/datasets) into a Spec. Errors: SpecError, a
ValueError that names the field; its text says what is required, what was found and what to do.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packer.naming import name_fault
from packer.packing import ONE_CAPACITY
from packer.shard import FORMAT_VERSION
from packer.shown import is_text, kind, shown

# Raised whenever equal specs would give other bytes than before: old datasets keep their ids.
ENGINE_VERSION = 6

MAX_TOKENS_LIMIT = 1 << 24
MOST_CAPACITIES = 64  # of max_tokens as a list
_JOINABLE = ("text", "prompt", "completion")  # fields that are texts

Format = Literal["auto", "text", "prompt_completion", "messages", "tokens"]
OnBadRow = Literal["fail", "skip"]
Loss = Literal["auto", "all", "completion", "assistant", "last_assistant"]
# "masks": what says which tokens are trained, beside the fields in use; "inputs": a second part of a prompt.
What = Literal["masks", "inputs"]
Strategy = Literal["best_fit", "sequential", "wrapped", "minibatch", "step", "padded"]
Overlong = Literal["truncate", "split", "drop", "error"]
Scope = Literal["window", "global"]
Balance = Literal["none", "attention"]
TruncateSide = Literal["right", "left"]
AutoBool = Literal["auto"] | bool


class SpecError(ValueError):
    """A field of a spec is wrong. `field` is its dotted name, or None where none is to blame."""

    def __init__(self, field: str | None, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.field = field
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Where examples come from and how to read them."""

    paths: tuple[str, ...]
    format: Format = "auto"
    fields: Mapping[str, str] = field(default_factory=dict)  # our name: the source's name
    on_bad_row: OnBadRow = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer and chat template, and which special tokens are added."""

    path: str
    revision: str | None = None
    chat_template: str | None = None  # a Jinja text, or the path of one; else the tokenizer's own
    add_bos: AutoBool = "auto"
    add_eos: AutoBool = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSpec:
    """How segments are laid into packs."""

    strategy: Strategy = "best_fit"
    max_tokens: int | tuple[int, ...] = 8192  # several, rising: each example in the smallest that holds it
    overlong: Overlong = "truncate"
    minibatch_size: int | None = None
    step_size: int | None = None
    segment_multiple: int = 1
    pack_multiple: int = 1
    scope: Scope = "window"  # of best_fit: what it looks at before it fills a pack
    balance: Balance = "none"  # of best_fit: "attention" puts packs of equal cost side by side
    truncate_side: TruncateSide = "right"  # of overlong "truncate": which end is cut off
    min_piece: int = 1  # of overlong "split": the shortest piece, in tokens

    @property
    def capacities(self) -> tuple[int, ...]:
        """max_tokens of the packs that there may be, rising."""
        return (self.max_tokens,) if isinstance(self.max_tokens, int) else self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A dataset, as asked for."""

    name: str | None = None
    source: SourceSpec
    tokenizer: TokenizerSpec | None = None  # ready token ids need none
    loss: Loss = "auto"
    packing: PackingSpec = field(default_factory=PackingSpec)
    shuffle_seed: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One source file and what identifies its content. `reader` is how it is read: "jsonl", …

    Of a packed dataset (dataset://ID) the reader is "dataset" and the digest its id.
    """

    path: str
    num_bytes: int
    digest: str  # of the content; or the etag, for an object store
    reader: str
    compression: str | None = None  # "gzip" or "zstd"
    mtime_ns: int | None = None  # last change when it was resolved; no part of its identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A spec with nothing left open: `auto` settled, inputs and tokenizer identified."""

    dataset: str
    spec: Spec
    inputs: tuple[InputFile, ...]
    tokenizer_digest: str
    ignored: tuple[str, ...] = ()  # files of a folder that are no sources, by name
    warnings: tuple[str, ...] = ()  # what a careful colleague would say of the spec, before any work
    model_max_length: int | None = None  # tokens that the model takes, as its tokenizer says
    watch: tuple[What, ...] = ()  # what no record may hold (packer.sources.watch)


# ------------------------------------------------------------------ parse


def parse_spec(document: Any) -> Spec:
    """Check a JSON document and give its Spec. Raises SpecError for the first wrong field."""
    spec = stored_spec(document)
    if fault := name_fault(spec.name):
        raise SpecError("name", fault)
    for ours, theirs in spec.source.fields.items():
        if "+" in theirs and ours not in _JOINABLE:
            raise SpecError(
                "source.fields",
                f'"+" joins texts ({", ".join(_JOINABLE)}), found {shown(theirs)} for {ours}; name one '
                "field of the source, or put them together there",
            )
    if len(spec.packing.capacities) > MOST_CAPACITIES:
        raise SpecError(
            "packing.max_tokens",
            f"a list of at most {MOST_CAPACITIES} is required, found {len(spec.packing.capacities)}; leave "
            "some out: an example goes into the smallest that holds it",
        )
    return spec


def stored_spec(document: Any) -> Spec:
    """A spec that was accepted once, maybe by an earlier release, which allowed more. Raises SpecError."""
    spec: Spec = _parse(Spec, document, "")
    spec = dataclasses.replace(spec, packing=_in_order(spec.packing))
    packing = spec.packing
    if not spec.source.paths:
        raise SpecError("source.paths", "at least one file, folder, glob or url is required, found none")
    unknown = set(spec.source.fields) - {
        "text",
        "prompt",
        "completion",
        "messages",
        "tools",
        "input_ids",
        "labels",
        "attention_mask",
    }
    if unknown:
        raise SpecError(
            "source.fields",
            "left sides are padfree's names (text, prompt, completion, messages, tools, input_ids, labels, "
            f'attention_mask), found {", ".join(sorted(unknown))}; write fields as {{"prompt": "question"}} '
            "(--field prompt=question)",
        )
    for max_tokens in packing.capacities:
        if not 1 <= max_tokens <= MAX_TOKENS_LIMIT:
            raise SpecError(
                "packing.max_tokens",
                f"a whole number from 1 to {MAX_TOKENS_LIMIT} is required, found {max_tokens}; "
                "use the longest sequence your training step takes, for example 8192",
            )
    for name in ("segment_multiple", "pack_multiple", "minibatch_size", "step_size", "min_piece"):
        value = getattr(packing, name)
        if value is not None and not 1 <= value <= MAX_TOKENS_LIMIT:
            raise SpecError(
                f"packing.{name}", f"a whole number from 1 to {MAX_TOKENS_LIMIT} is required, found {value}"
            )
    for name, strategy, what in (
        ("minibatch_size", "minibatch", "mini-batch"),
        ("step_size", "step", "step"),
    ):
        if packing.strategy == strategy and getattr(packing, name) is None:
            raise SpecError(
                f"packing.{name}",
                f'strategy "{strategy}" requires it (examples a {what}), found null; set a number',
            )
    _check_layout(packing)
    return spec


def _in_order(packing: PackingSpec) -> PackingSpec:
    """The same packing with its capacities said in one way: rising, each once, a single one as a number."""
    if isinstance(packing.max_tokens, int):
        return packing
    rising = tuple(sorted(set(packing.max_tokens)))
    if not rising:
        raise SpecError(
            "packing.max_tokens",
            "a whole number, or a list of at least one, is required, found []; for example 8192",
        )
    return dataclasses.replace(packing, max_tokens=rising if len(rising) > 1 else rising[0])


def _check_layout(packing: PackingSpec) -> None:
    """Options of packing that do not go together."""
    for name, plain in (("scope", "window"), ("balance", "none")):
        value = getattr(packing, name)
        if value != plain and packing.strategy != "best_fit":
            raise SpecError(
                f"packing.{name}",
                f'"{value}" goes with strategy "best_fit", found strategy "{packing.strategy}"; leave it out',
            )
    several = ONE_CAPACITY.get(packing.strategy) if len(packing.capacities) > 1 else None
    if several:
        raise SpecError(
            "packing.max_tokens",
            f'one number is required under strategy "{packing.strategy}", which {several}, found '
            f'{list(packing.capacities)}; set {packing.capacities[-1]}, or use "best_fit", "sequential" or '
            '"padded"',
        )
    for max_tokens in packing.capacities:
        pack = max_tokens // packing.pack_multiple * packing.pack_multiple
        longest = pack // packing.segment_multiple * packing.segment_multiple
        if not longest:
            raise SpecError(
                "packing.max_tokens",
                f"at least segment_multiple and pack_multiple is required, found {max_tokens} with "
                f"{packing.segment_multiple} and {packing.pack_multiple}; raise it",
            )
    if packing.overlong == "split" and packing.min_piece > (longest + 1) // 2:
        raise SpecError(
            "packing.min_piece",
            f"at most {(longest + 1) // 2} is required, half of the longest segment, "
            f"found {packing.min_piece}",
        )


# What stands where an object is required.
_EXAMPLES = {
    "source": '{"paths": ["…"]}',
    "tokenizer": '{"path": "…"}',
    "packing": '{"max_tokens": 8192}',
}


def _parse(cls: type, document: Any, prefix: str) -> Any:
    where = prefix.rstrip(".") or None
    if not isinstance(document, Mapping):
        example = _EXAMPLES.get(where or "", "")
        if example and isinstance(document, str):
            example = example.replace("…", document[:60])
        hint = f"; for example {example}" if example else ""
        raise SpecError(where, f"an object is required, found {kind(document)}{hint}")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name in document:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
            printable = str(name).encode("utf-8", "backslashreplace").decode()
            raise SpecError(f"{prefix}{printable}", f"there is no such field; {hint}")
    values = {}
    for name, spec_field in known.items():
        if name in document:
            values[name] = _value(hints[name], document[name], f"{prefix}{name}")
        elif spec_field.default is dataclasses.MISSING and spec_field.default_factory is dataclasses.MISSING:
            raise SpecError(f"{prefix}{name}", "this field is required and was not given")
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _parse(typing.cast(type, hint), value, f"{where}.")
    if origin is Literal:
        if value in args and isinstance(value, str):
            return value
        wanted = ", ".join(repr(arg) for arg in args)
        close = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        hint_text = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(where, f"one of {wanted} is required, found {shown(value)}{hint_text}")
    if origin is tuple:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            raise SpecError(where, f"a list of texts is required, found {kind(value)}")
        return tuple(_value(args[0], item, where) for item in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        texts = [*value, *value.values()] if isinstance(value, Mapping) else [None]
        if not all(isinstance(text, str) and is_text(text) for text in texts):
            raise SpecError(where, f"an object of texts is required, found {shown(value)}")
        return dict(sorted(value.items()))
    if origin in (typing.Union, types.UnionType):
        return _union(args, value, where)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and value:
        if not is_text(value):
            raise SpecError(where, "a text of Unicode characters without null is required, found another")
        return value
    names = {int: "a whole number", str: "a text (not empty)", bool: "true or false"}
    raise SpecError(where, f"{names.get(hint, hint)} is required, found {shown(value)}")


def _union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    if isinstance(value, bool) and bool in args:
        return value
    rest = [arg for arg in args if arg not in (type(None), bool)]
    if isinstance(value, list | tuple):  # where a list may stand, it comes after the single value
        rest = rest[::-1]
    if bool in args and value != "auto":
        raise SpecError(where, f'"auto", true or false is required, found {shown(value)}')
    return _value(rest[0], value, where)


# ------------------------------------------------------------------ identity


def to_document(value: Any) -> Any:
    """A spec or job as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_document(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_document(item) for item in value]
    return value


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(to_document(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def dataset_id(
    spec: Spec, *, inputs: tuple[InputFile, ...], tokenizer_digest: str, watch: tuple[What, ...] = ()
) -> str:
    """32 hex digits: a digest of all that decides the packed bytes, and of nothing else.

    Names and places (the dataset's name, paths of inputs and tokenizer) are left out; content is in.
    watch: as of a Job; it says which rows are left out where bad ones are skipped. Where they are not, the
    dataset has all rows or fails, whatever is looked for.
    """
    document = to_document(spec)
    del document["name"], document["source"]["paths"], document["tokenizer"]
    if spec.tokenizer is not None:
        document["tokenizer"] = {
            "digest": tokenizer_digest,
            "add_bos": spec.tokenizer.add_bos,
            "add_eos": spec.tokenizer.add_eos,
        }
    if watch and spec.source.on_bad_row == "skip":
        document["watch"] = sorted(watch)
    document["inputs"] = [
        {"num_bytes": i.num_bytes, "digest": i.digest, "reader": i.reader, "compression": i.compression}
        for i in inputs
    ]
    document["format_version"], document["engine_version"] = FORMAT_VERSION, ENGINE_VERSION
    return hashlib.sha256(canonical_json(document)).hexdigest()[:32]


def job_to_document(job: Job) -> dict[str, Any]:
    """A job as it is stored in spec.json."""
    return to_document(job)


def job_from_document(document: Mapping[str, Any]) -> Job:
    """The inverse of `job_to_document`."""
    return Job(
        dataset=document["dataset"],
        spec=stored_spec(document["spec"]),
        inputs=tuple(InputFile(**i) for i in document["inputs"]),
        tokenizer_digest=document["tokenizer_digest"],
        ignored=tuple(document["ignored"]),
        warnings=tuple(document.get("warnings", ())),
        model_max_length=document.get("model_max_length"),
        watch=tuple(document.get("watch", ())),
    )
