"""The first examples as they will be trained, token by token, and what a careful colleague would say."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.packing import tokens_of_minibatches
from packer.render import Rendered
from packer.report import beyond_model_warnings, unprinted_warnings
from packer.roles import unlearned_warnings
from packer.rows import beyond_model, largest_capacity, renderer_of, tokenizer_of
from packer.spec import Job
from packer.store import Store
from packer.tokenization import Tokenizer

SAMPLE_ROWS = 1000  # what the warnings look at
SAMPLE_TOKENS = 4 << 20  # or so many tokens, where rows are long
_NUM_PLACES = 3  # of rows that a warning is about
SHOWN_TOKENS = 16 << 10  # of one example; the rest is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token and its text, as the vocabulary spells it where it is a part of a character."""

    id: int
    text: str
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row as tokens (the first SHOWN_TOKENS of them), or why it cannot be used."""

    example: int
    place: str
    num_tokens: int
    num_trained: int
    tokens: list[Token]
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The first examples, and warnings about the first `num_rows` rows."""

    examples: list[Example]
    warnings: list[str]
    num_rows: int


def preview(job: Job, store: Store, num_examples: int, *, sample_rows: int = SAMPLE_ROWS) -> Preview:
    """Render the first rows in source order, as packing will; of a packed dataset take its first segments.

    Works in this process, reads no more than that takes, and writes no shard. What it unpacks lies in the
    store until the caller removes it. Raises what reading and rendering raise.
    """
    sample_rows = max(sample_rows, num_examples)
    if sources.is_packed(job.inputs):
        tokenizer = tokenizer_of(job, store)
        batches = _packed(job, store, sample_rows)
    else:
        renderer = renderer_of(job, store, whole=True)
        tokenizer = renderer.tokenizer
        batches = ((records, renderer.render(records.rows)) for records in _records(job, store, sample_rows))
    texts = _Texts(tokenizer)
    examples: list[Example] = []
    notes = _Notes(job, tokenizer)
    for records, rendered in batches:
        notes.add(rendered, records)
        wanted = num_examples - len(examples)
        found = list(_examples(records, rendered, texts, wanted))
        if records.errors:
            found.sort(key=_place)
        examples += found[:wanted]
        if notes.num_rows >= sample_rows or (notes.num_tokens >= SAMPLE_TOKENS and not wanted):
            break
    return Preview(examples=examples, warnings=[*job.warnings, *notes.warnings()], num_rows=notes.num_rows)


def _place(example: Example) -> int:
    return example.example


def _packed(job: Job, store: Store, num_rows: int) -> Iterator[tuple[sources.Records, Rendered]]:
    """The first segments of a dataset that is packed anew, as if they were rendered."""
    found = sources.first_segments(job.inputs[0], store=store, at_least=num_rows)
    records = sources.Records(example_ids=found.example_ids, rows=[], locations=found.locations, errors=[])
    rendered = Rendered(
        input_ids=found.input_ids, loss_mask=found.loss_mask, lengths=found.lengths, errors=[]
    )
    yield records, rendered


def _records(job: Job, store: Store, num_rows: int) -> Iterator[sources.Records]:
    """The first records, file after file, with the example ids that they will have."""
    fields = dict(job.spec.source.fields)
    first = 0
    for number, one in enumerate(job.inputs):
        index = sources.index_input(
            one,
            store=store,
            work_key=f"work/{number}",
            random_access=False,
            fields=fields,
            watch=job.watch,
            max_records=num_rows,
        )
        for partition in sources.cut([index], shuffle_seed=None):
            for records in sources.read_partition(partition, store=store, fields=fields, watch=job.watch):
                yield dataclasses.replace(
                    records,
                    example_ids=records.example_ids + first,
                    errors=[
                        dataclasses.replace(one, example_id=one.example_id + first) for one in records.errors
                    ],
                )
        first += index.file.num_records


def _examples(records: sources.Records, rendered: Rendered, texts: _Texts, wanted: int) -> Iterator[Example]:
    """The first `wanted` rows, and the unreadable ones among them."""
    if not wanted:
        return
    wrong = dict(rendered.errors)
    bounds = np.concatenate([[0], np.cumsum(rendered.lengths)]).tolist()
    for row, (start, stop) in enumerate(islice(pairwise(bounds), wanted)):
        ids, trained = rendered.input_ids[start:stop], rendered.loss_mask[start:stop].copy()
        trained[:1] = False  # of a segment the first token is never trained: nothing comes before it
        pairs = zip(ids[:SHOWN_TOKENS].tolist(), trained[:SHOWN_TOKENS].tolist(), strict=True)
        yield Example(
            example=int(records.example_ids[row]),
            place=str(records.locations[row]),
            num_tokens=len(ids),
            num_trained=int(np.count_nonzero(trained)),
            tokens=[Token(id=i, text=texts.of(i), trained=is_trained) for i, is_trained in pairs],
            error=wrong.get(row),
        )
    for error in records.errors:
        yield Example(
            example=error.example_id,
            place=error.location,
            num_tokens=0,
            num_trained=0,
            tokens=[],
            error=error.reason,
        )


class _Texts:
    """The text of each token that is shown."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = _text(token_id, self._tokenizer)
        return self._known[token_id]


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token_id)
    text = tokenizer.decode([token_id])
    return text if text and "\ufffd" not in text else tokenizer.token(token_id)


class _Notes:
    """Counts over the rows of a sample, and the warnings that follow from them."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None) -> None:
        packing = job.spec.packing
        self._job = job
        self._capacity = largest_capacity(job.spec)
        self._limit = self._capacity.segment
        self._repacks = sources.is_packed(job.inputs)
        self._bos = tokenizer.bos_id if tokenizer is not None else None
        self._control = tokenizer.is_control if tokenizer is not None else None
        self._counts: Counter[str] = Counter()
        self._places: defaultdict[str, list[str]] = defaultdict(list)  # of the first such rows
        self._unprinted: Counter[str] = Counter()
        self._unlearned: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._minibatch_size = packing.minibatch_size if packing.strategy == "minibatch" else None
        self._lengths: list[NDArray[np.int64]] = []  # of the rows, for mini-batches
        self._reason = ""  # why the first unusable row is one

    @property
    def num_rows(self) -> int:
        return self._counts["rows"]

    @property
    def num_tokens(self) -> int:
        return self._counts["tokens"]

    def add(self, rendered: Rendered, records: sources.Records) -> None:
        """Count the rows of a batch, the unreadable ones too."""
        num_unreadable = len(records.errors)
        self._counts["rows"] += len(rendered.lengths) + num_unreadable
        self._counts["tokens"] += len(rendered.input_ids)
        self._counts["unusable"] += len(rendered.errors) + num_unreadable
        self._counts["empty"] += int(np.count_nonzero(rendered.lengths == 0)) - len(rendered.errors)
        self._unprinted.update(rendered.unprinted)
        self._unlearned.update(rendered.unlearned)
        self._counts["beyond_model"] += beyond_model(rendered.lengths, self._job)
        if self._minibatch_size:
            self._lengths.append(np.asarray(rendered.lengths, np.int64))
        wrong = {int(records.example_ids[row]): records.locations[row] for row, _ in rendered.errors}
        unusable = {one.example_id: one.location for one in records.errors} | wrong
        for example in sorted(unusable):
            self._note("unusable", unusable[example])
        if unusable and not self._reason:
            first = min(unusable)
            reasons = {int(records.example_ids[row]): reason for row, reason in rendered.errors}
            reasons |= {one.example_id: one.reason for one in records.errors}
            self._reason = f" ({reasons[first]})"
        bounds = np.concatenate([[0], np.cumsum(rendered.lengths)]).tolist()
        for row, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop and self._look(rendered.input_ids[start:stop], rendered.loss_mask[start:stop]):
                self._note("untrained", records.locations[row])

    def _note(self, what: str, place: object) -> None:
        if len(self._places[what]) < _NUM_PLACES:
            self._places[what].append(str(place))

    def _look(self, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> bool:
        """Count what a row with tokens is like. Whether it trains nothing."""
        counts, key = self._counts, hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        counts["whole"] += 1
        counts["twice"] += key in self._seen
        self._seen.add(key)
        counts["long"] += len(ids) > self._limit
        is_untrained = not bool(mask[1:].any())
        counts["untrained"] += is_untrained
        counts["two_bos"] += self._bos is not None and bool((ids[:2] == self._bos).all()) and len(ids) > 1
        if self._control is not None:
            counts["ended"] += bool((self._control[ids] & mask)[1:].any())
        return is_untrained

    def warnings(self) -> list[str]:
        counts, whole = self._counts, self._counts["whole"]
        texts = {
            "unusable": "cannot be used (see source.on_bad_row)",
            "long": f"are longer than a pack takes ({self._limit} tokens; see packing.overlong, --overlong)",
            "empty": "have no tokens and will be left out",
            "untrained": "train no token" + ("" if self._repacks else " and will be left out"),
            "two_bos": "begin with two BOS tokens: take one out, or set tokenizer.add_bos to false",
            "twice": "have the tokens of an earlier row: duplicates",
        }
        found = [
            f"{count:,} of the first {self.num_rows:,} rows ({_percent(count, self.num_rows)}) {text}"
            + self._listed(name)
            for name, text in texts.items()
            if (count := counts[name])
        ]
        found += self._minibatches()
        found += unprinted_warnings(self._unprinted, self.num_rows)
        found += unlearned_warnings(self._unlearned)
        found += beyond_model_warnings(counts["beyond_model"], self._job.model_max_length)
        if whole and self._control is not None and not counts["ended"]:
            found.append("no end token (EOS or end of turn) is trained: the model will not learn to stop")
        return found

    def _listed(self, name: str) -> str:
        """The places of the first such rows, where they are kept; of unusable ones also why the first is."""
        if not self._places[name]:
            return ""
        first, *others = self._places[name]
        reason = self._reason if name == "unusable" else ""
        return f"; the first: {'; '.join([first + reason, *others])}"

    def _minibatches(self) -> list[str]:
        """A warning where mini-batches of the sample do not fit into a pack.

        Of rows in source order: which rows a shuffle puts together is not known yet.
        """
        if not self._minibatch_size or not self._lengths:
            return []
        sizes = tokens_of_minibatches(np.concatenate(self._lengths), self._capacity, self._minibatch_size)
        count = int(np.count_nonzero(sizes > self._capacity.pack))
        if not count:
            return []
        return [
            f"{count:,} of the first {len(sizes):,} mini-batches of {self._minibatch_size} rows (in source "
            f"order) take more than a pack holds ({self._capacity.pack} tokens), the largest {sizes.max()}: "
            "each is one pack, so rows are cut, left out or refused, as packing.overlong says; raise "
            "packing.max_tokens (packs take no more than they need), or lower packing.minibatch_size"
        ]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if part * 100 >= whole else "under 1%"
