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
from packer.pipeline import make_renderer
from packer.render import LOSSES
from packer.spec import Job, Loss, Spec, SpecError, dataset_id
from packer.store import LocalStore
from packer.tokenization import Bundle, Tokenizer


def resolve(spec: Spec, *, store: LocalStore, roots: Sequence[Path] | None = None) -> Job:
    """Settle what a spec leaves open and identify its content; saves the tokenizer into the store.

    `roots`: folders that local paths must lie in; None allows all. Takes as long as reading the inputs
    once. Raises SpecError, SourceError, TokenizerError, RenderError.
    """
    inputs, ignored = sources.resolve_inputs(spec.source.paths, roots=roots)
    format_, fields = sources.detect_format(inputs, spec.source)
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
    return Job(
        dataset=dataset_id(resolved, inputs=inputs, tokenizer_digest=digest),
        spec=resolved,
        inputs=inputs,
        tokenizer_digest=digest,
        ignored=tuple(ignored),
        warnings=renderer.warnings,
    )
