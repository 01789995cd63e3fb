"""From a spec to a job: nothing left open, everything identified.

Reads the tokenizer, looks at the first record, takes digests of the inputs. Errors name the field:
SpecError, sources.SourceError (source.paths), TokenizerError and RenderError (tokenizer.path).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from packer import sources
from packer.render import LOSSES
from packer.rows import make_renderer
from packer.spec import Job, Loss, Spec, SpecError, TokenizerSpec, dataset_id
from packer.store import Store
from packer.tokenization import Bundle, Tokenizer


def resolve(spec: Spec, *, store: Store, roots: Sequence[Path] | None = None, identify: bool = True) -> Job:
    """Settle what a spec leaves open and identify its content; saves the tokenizer into the store.

    `roots`: folders that local paths must lie in; None allows all. Takes as long as reading the inputs
    once; not so without `identify`, for previews: then the job has no id, and cannot be packed. Raises
    SpecError, SourceError, TokenizerError, RenderError.
    """
    if sources.names_dataset(spec.source.paths):
        return _resolve_repack(spec, store, roots)
    inputs, ignored = sources.resolve_inputs(spec.source.paths, roots=roots, digests=identify)
    format_, fields, unread = sources.detect_format(inputs, spec.source, loss=spec.loss)
    allowed = LOSSES[format_]
    if spec.loss != "auto" and spec.loss not in allowed:
        raise SpecError(
            "loss", f'format "{format_}" takes loss auto or {" or ".join(allowed)}, found "{spec.loss}"'
        )
    # Ready ids keep "auto": as their labels say.
    loss = cast(Loss, allowed[0]) if spec.loss == "auto" and format_ != "tokens" else spec.loss
    tokenizer, digest = None, ""
    if spec.tokenizer is not None:
        bundle = Bundle.read(
            spec.tokenizer.path,
            revision=spec.tokenizer.revision,
            chat_template=spec.tokenizer.chat_template,
            roots=roots,
        )
        tokenizer, digest = Tokenizer(bundle), bundle.digest
        bundle.save(store)
    elif format_ != "tokens":
        raise SpecError(
            "tokenizer.path",
            f'format "{format_}" requires a tokenizer, none was given; name a folder with tokenizer.json',
        )
    source = dataclasses.replace(spec.source, format=format_, fields=fields)
    resolved = dataclasses.replace(spec, source=source, loss=loss)
    # Made once here, so that a template that cannot be used is told before any work is done.
    renderer = make_renderer(resolved, tokenizer)
    watch = sources.watch_of(spec.source, spec.loss, fields)
    dataset = ""
    if identify:
        dataset = dataset_id(resolved, inputs=inputs, tokenizer_digest=digest, watch=watch)
    return Job(
        dataset=dataset,
        spec=resolved,
        inputs=inputs,
        tokenizer_digest=digest,
        ignored=tuple(ignored),
        warnings=(*([unread] if unread else ()), *renderer.warnings),
        model_max_length=tokenizer.model_max_length if tokenizer is not None else None,
        watch=watch,
    )


def _resolve_repack(spec: Spec, store: Store, roots: Sequence[Path] | None) -> Job:
    """The job that packs the segments of a dataset anew: what made them is what made them there."""
    packed = sources.resolve_packed(spec.source.paths, store)
    made, name = packed.job, packed.input.path
    if spec.source.format not in ("auto", "tokens") or spec.source.fields:
        raise SpecError(
            "source.fields" if spec.source.fields else "source.format",
            f"{name} holds token ids and masks, which have neither format nor fields to name; leave it out",
        )
    if spec.loss not in ("auto", made.spec.loss):
        raise SpecError(
            "loss",
            f'what is trained was settled when {name} was packed (loss "{made.spec.loss}"), found '
            f'"{spec.loss}"; leave it out, or pack the files anew',
        )
    if spec.tokenizer is not None and spec.tokenizer != made.spec.tokenizer:
        _require_tokenizer(spec.tokenizer, made, name, roots)
    resolved = dataclasses.replace(
        spec,
        source=dataclasses.replace(spec.source, paths=(name,), format="tokens"),
        tokenizer=made.spec.tokenizer,
        loss=made.spec.loss,
    )
    return Job(
        dataset=dataset_id(resolved, inputs=(packed.input,), tokenizer_digest=made.tokenizer_digest),
        spec=resolved,
        inputs=(packed.input,),
        tokenizer_digest=made.tokenizer_digest,
        warnings=(*made.warnings, *packed.warnings),
        model_max_length=made.model_max_length,
    )


def _require_tokenizer(asked: TokenizerSpec, made: Job, name: str, roots: Sequence[Path] | None) -> None:
    """Raise SpecError where a tokenizer is named that is not the one of the dataset to be repacked."""
    theirs = made.spec.tokenizer
    if theirs is None:
        raise SpecError(
            "tokenizer.path",
            f"{name} was packed from ready ids without a tokenizer, found {asked.path!r}; leave it out",
        )
    bundle = Bundle.read(asked.path, revision=asked.revision, chat_template=asked.chat_template, roots=roots)
    for field, mine, other in (
        ("path", f"content {bundle.digest[:12]}", f"content {made.tokenizer_digest[:12]}"),
        ("add_bos", asked.add_bos, theirs.add_bos),
        ("add_eos", asked.add_eos, theirs.add_eos),
    ):
        if mine != other:
            raise SpecError(
                f"tokenizer.{field}",
                f"{name} was tokenized with {theirs.path!r} ({other}), found {asked.path!r} ({mine}); "
                "leave the tokenizer out, or pack the files anew",
            )
