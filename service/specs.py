"""Specs that come over the wire: their errors as answers that name the field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from packer.spec import Job, Spec, SpecError, parse_spec
from packer.store import Store
from service import problems, uploads
from service.state import Service


def json_of(body: bytes) -> Any:
    """The document of a body. Raises the Problem of one that is not JSON, or says something twice."""
    try:
        return json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise problems.malformed_json(f"a spec as a JSON object is required; {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises the Problem of a field that is there twice: of which Python takes the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise problems.bad_spec(name[:60], "this field is required once at most, found it several times")
        found[name] = value
    return found


def parsed(document: Any) -> Spec:
    """The spec of a document. Raises the Problem of the first wrong field."""
    try:
        return parse_spec(document)
    except SpecError as error:
        raise problems.bad_spec(error.field, error.detail) from error


def resolved(spec: Spec, service: Service, store: Store, identify: bool = True) -> Job:
    """The job of a spec, uploads and data roots seen to. Blocks; raises Problems.

    store: where the tokenizer is saved, and dataset:// looked up. identify: as of packer.resolve.resolve.
    """
    # Imported here: a replica that only serves loads neither tokenizers nor sources.
    from packer.render import RenderError
    from packer.resolve import resolve
    from packer.sources import SourceError
    from packer.tokenization import TokenizerError

    roots: tuple[Path, ...] = service.settings.data_roots
    paths = uploads.local_paths(spec.source.paths, service.store)
    if paths != spec.source.paths:
        spec = dataclasses.replace(spec, source=dataclasses.replace(spec.source, paths=paths))
        roots += uploads.roots(service.store)
    try:
        return resolve(spec, store=store, roots=roots, identify=identify)
    except SpecError as error:
        raise problems.bad_spec(error.field, error.detail) from error
    except SourceError as error:
        raise problems.bad_spec(getattr(error, "field", None) or "source.paths", str(error)) from error
    except (TokenizerError, RenderError) as error:
        raise problems.bad_spec(getattr(error, "field", None) or "tokenizer.path", str(error)) from error
