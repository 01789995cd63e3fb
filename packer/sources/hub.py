"""Datasets of the Hugging Face Hub, through the `datasets` library.

    hf://REPO?config=&split=&revision=                  prepared in its cache, read as the files it keeps
    hf://REPO?config=&split=&revision=&streaming=true   read as they come (packer.sources.hubstream)

`datasets` downloads and caches (it honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE); what is packed are the
files in its cache, identified by their content like any others.
"""

from __future__ import annotations

import os
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packer.sources.values import SourceError

_OPTIONS = ("config", "split", "revision", "streaming")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """What an hf:// url names. `split` is "train" where it names none."""

    url: str
    repo: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool


def parse_hub(url: str, *, local: bool) -> HubName:
    """Read an hf:// url. Raises SourceError.

    `local`: a folder of this machine may stand for the repo, and a repo may name files of this machine;
    a service that keeps to its data folders says no.
    """
    repo, _, query = url.removeprefix("hf://").partition("?")
    options = dict(urllib.parse.parse_qsl(query))
    unknown = set(options) - set(_OPTIONS)
    split, streaming = options.get("split", "train"), options.get("streaming", "false")
    if not repo or unknown:
        what = f"found {', '.join(sorted(unknown))}" if unknown else "found no repo"
        raise SourceError(f"{url}: hf://REPO?config=&split=&revision=&streaming= is required, {what}")
    if streaming not in ("true", "false"):
        raise SourceError(f"{url}: streaming=true or streaming=false is required, found {streaming!r}")
    if "[" in split:
        raise SourceError(
            f"{url}: a whole split is required, found the slice {split!r}; name the split alone"
        )
    if not local and os.path.exists(repo):
        raise SourceError(
            f"{url}: a dataset of the Hub is required, found a local path; give it without hf://"
        )
    return HubName(
        url=url,
        repo=repo,
        config=options.get("config"),
        split=split,
        revision=options.get("revision"),
        streaming=streaming == "true",
    )


def open_builder(name: HubName, *, local: bool) -> Any:
    """The `datasets` builder of a name. Raises SourceError where there is none, or it may not be read."""
    try:
        import datasets  # takes a second or two: only where it is needed
    except ImportError as error:
        raise SourceError(
            f"{name.url}: the package `datasets` is required: pip install '.[service]' in padfree's checkout"
        ) from error
    try:
        builder = datasets.load_dataset_builder(name.repo, name.config, revision=name.revision)
    except Exception as error:  # the library raises many kinds: of the network, of files, of names
        raise unprepared(name, error) from error
    if not local:
        _check_remote(name.url, builder)
    return builder


def prepare(name: HubName, *, local: bool) -> list[Path]:
    """The Arrow files of a split, in order, downloaded and prepared if need be. Raises SourceError."""
    builder = open_builder(name, local=local)
    try:
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=name.split)
    except Exception as error:  # as above
        raise unprepared(name, error) from error
    files = [Path(file["filename"]) for file in dataset.cache_files]
    if not files:
        raise SourceError(f"{name.url}: `datasets` keeps no files of split {name.split!r}; is it empty?")
    return files


def unprepared(name: HubName, error: Exception) -> SourceError:
    """What to raise where `datasets` failed."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return SourceError(
        f"{name.url}: `datasets` could not prepare it ({reason}); "
        "check repo, config and split, and access to the Hub"
    )


def _check_remote(url: str, builder: Any) -> None:
    """A repo's own card says which files it has; refuse files of this machine."""
    listed = (getattr(builder.config, "data_files", None) or {}).values()
    for name in (str(file) for files in listed for file in files):
        if not name.startswith(("hf://", "https://")):
            raise SourceError(f"{url}: the dataset names a file outside the Hub, which is not read here")
