"""A tokenizer's files as bytes, named by their content: what a dataset's id and its workers need.

Errors: TokenizerError (a ValueError), permanent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packer.store import Store
from packer.tokenization.convert import FOREIGN_NAMES, ConversionError, convert, is_foreign

BUNDLE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class TokenizerError(ValueError):
    """A tokenizer is not there, cannot be read, or cannot do what is asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The files that make a tokenizer, by name (of BUNDLE_NAMES), as they will be used."""

    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """sha256 over names and contents, the chat template's with them; 64 hex digits."""
        total = hashlib.sha256()
        for name in sorted(self.files):
            content = hashlib.sha256(self.files[name]).hexdigest()
            total.update(f"{name} {content}\n".encode())
        return total.hexdigest()

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        chat_template: str | None = None,
        roots: Sequence[Path] | None = None,
    ) -> Bundle:
        """The bundle of a folder, of a tokenizer.json alone, or of a Hub id ("org/name").

        Other files of tokenizers (tokenizer.model, tekken.json, …) are converted (convert/).

        chat_template: a Jinja text (one with a "{" in it) or the path of one; it takes the place of
        the tokenizer's own. Relative paths are looked up in the working folder, then in each root. roots:
        folders that the path of a template must lead into; None allows all. (A
        template prints what its file says; of a tokenizer's folder, which may lie where models lie, nothing
        but a tokenizer is read.) Raises TokenizerError, which says what was looked for.
        """
        try:
            return cls._read(path, revision, chat_template, roots)
        except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(f"tokenizer.path: {str(path)[:80]!r} cannot be read: {error}") from error

    @classmethod
    def _read(
        cls,
        path: str | os.PathLike[str],
        revision: str | None,
        chat_template: str | None,
        roots: Sequence[Path] | None,
    ) -> Bundle:
        place = _placed(path, roots)
        if place.is_dir():
            files = {name: (place / name).read_bytes() for name in BUNDLE_NAMES if (place / name).is_file()}
            foreign = {} if "tokenizer.json" in files else _foreign(place)
            if foreign:
                files |= _converted(foreign, files)
            elif "tokenizer.json" not in files:
                found = ", ".join(sorted(entry.name for entry in place.iterdir())[:10]) or "nothing"
                if roots is not None:  # whoever asks a service may not look around on its disk
                    found = "none"
                raise TokenizerError(
                    f"tokenizer.path: the folder {place} must hold a tokenizer.json, found {found}; "
                    "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)` of transformers writes one "
                    "(tokenizer.model, tekken.json, *.tiktoken, vocab.json with merges.txt are taken too)"
                )
        elif place.is_file():
            data = place.read_bytes()
            files = _converted({place.name: data}, {}) if is_foreign(data) else {"tokenizer.json": data}
        else:
            files = _download(str(path), revision, roots)
        for name, data in files.items():
            if name.endswith(".json"):
                _json(name, data, place)
        if chat_template is not None:
            files.pop("chat_template.json", None)
            if "{" not in chat_template:
                chat_template = str(_placed(chat_template, roots))
                _check_inside(Path(chat_template), roots)
            files["chat_template.jinja"] = _template_text(chat_template).encode()
        return cls(files=files)

    def save(self, store: Store) -> str:
        """Put the files under tokenizers/<digest>/; returns the digest."""
        digest = self.digest
        for name, data in self.files.items():
            key = f"tokenizers/{digest}/{name}"
            if not store.exists(key):
                store.put(key, data)
        return digest

    @classmethod
    def load(cls, store: Store, digest: str) -> Bundle:
        """The inverse of `save`. Raises TokenizerError where a file is missing or changed."""
        prefix = f"tokenizers/{digest}"
        bundle = cls(files={name: store.get(f"{prefix}/{name}") for name in store.list(prefix)})
        if bundle.digest != digest:
            raise TokenizerError(
                f"the store's tokenizer {digest} is missing or damaged (its files give {bundle.digest}); "
                "post the dataset again to save it anew"
            )
        return bundle

    def document(self, name: str) -> dict[str, Any]:
        """A JSON file of the bundle; {} where there is none."""
        return _json(name, self.files[name], None) if name in self.files else {}


def _foreign(folder: Path) -> dict[str, bytes]:
    """The files of a folder that a tokenizer.json can be made of."""
    for names in FOREIGN_NAMES:
        found = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
        if len(found) == len(names):
            return {path.name: path.read_bytes() for path in found}
        if len(found) > len(names):
            raise TokenizerError(
                f"tokenizer.path: the folder {folder} must hold one file {names[0]}, found {len(found)}; "
                "name the file"
            )
    return {}


def _converted(foreign: Mapping[str, bytes], beside: Mapping[str, bytes]) -> dict[str, bytes]:
    try:
        return convert(foreign, beside)
    except ConversionError as error:
        raise TokenizerError(f"tokenizer.path: {error}") from error


def _placed(path: str | os.PathLike[str], roots: Sequence[Path] | None) -> Path:
    """The path, or the first that is there under a root, as of sources, where the working folder has none."""
    place = Path(path)
    if place.is_absolute() or place.exists():
        return place
    return next((root / place for root in roots or () if (root / place).exists()), place)


def _check_inside(path: Path, roots: Sequence[Path] | None) -> None:
    """Judged by where the path really leads, links and ".." followed."""
    real = Path(os.path.realpath(path))
    if roots is not None and not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        raise TokenizerError(
            f"tokenizer.chat_template: {path} leads out of the data folders of the service "
            f"(it has {len(roots)}, by --data-root or PADFREE_DATA_ROOTS); put it into one of them, or "
            "start the service with --data-root and the folder that holds it"
        )


def _json(name: str, data: bytes, place: Path | None) -> dict[str, Any]:
    where = f"{name} of {place}" if place else name
    try:
        document = json.loads(data)
    except ValueError as error:
        raise TokenizerError(f"tokenizer.path: {where} must be JSON: {error}; copy the file again") from error
    if not isinstance(document, dict):
        raise TokenizerError(
            f"tokenizer.path: {where} must be a JSON object, found a {type(document).__name__}"
        )
    return document


def _template_text(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"tokenizer.chat_template: a Jinja text or the path of one is required, found {chat_template!r}, "
            f"which cannot be read: {error}"
        ) from error


def _download(path: str, revision: str | None, roots: Sequence[Path] | None) -> dict[str, bytes]:
    is_asked_of_service = roots is not None and not Path(path).is_absolute()
    here = "in the service's working folder or its data folders" if is_asked_of_service else "here"
    parts = path.split("/")
    if len(parts) != 2 or not all(parts) or parts[0].startswith((".", "~")):
        raise TokenizerError(
            f"tokenizer.path: a folder with a tokenizer, a tokenizer.json, or a Hub id (org/name) is "
            f"required, found {path!r}: there is no such folder or file {here}"
        )
    from huggingface_hub import snapshot_download  # heavy, and of no use to local tokenizers

    patterns = [*BUNDLE_NAMES, *(name for names in FOREIGN_NAMES for name in names)]
    try:
        folder = snapshot_download(path, revision=revision, allow_patterns=patterns)
    except Exception as error:  # the Hub's client raises many kinds, the HTTP client's too
        raise TokenizerError(
            f"tokenizer.path: there is no folder or file {path!r} {here}, and the Hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}); "
            "give a local folder, or check the name and the network"
        ) from error
    return dict(Bundle.read(folder).files)
