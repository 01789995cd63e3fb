"""Datasets of the Hugging Face Hub: prepared by the `datasets` library, read as the Arrow files it keeps.

    hf://REPO?config=&split=&revision=

`datasets` downloads and caches (it honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE); what is packed are the
files in its cache, identified by their content like any others.
"""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path
from typing import Any

from packer.sources.values import SourceError

_OPTIONS = ("config", "split", "revision")


def resolve_hub(url: str, *, local: bool) -> list[Path]:
    """The Arrow files of one split ("train" where none is named), in order.

    `local`: a folder of this machine may stand for the repo, and a repo may name files of this machine;
    a service that keeps to its data folders says no. Raises SourceError.
    """
    repo, _, query = url.removeprefix("hf://").partition("?")
    options = dict(urllib.parse.parse_qsl(query))
    unknown = set(options) - set(_OPTIONS)
    split = options.get("split", "train")
    if not repo or unknown:
        what = f"found {', '.join(sorted(unknown))}" if unknown else "found no repo"
        raise SourceError(f"{url}: hf://REPO?config=&split=&revision= is required, {what}")
    if "[" in split:
        raise SourceError(
            f"{url}: a whole split is required, found the slice {split!r}; name the split alone"
        )
    if not local and os.path.exists(repo):
        raise SourceError(
            f"{url}: a dataset of the Hub is required, found a local path; give it without hf://"
        )
    return _prepare(url, repo, split, options, local)


def _prepare(url: str, repo: str, split: str, options: dict[str, str], local: bool) -> list[Path]:
    try:
        import datasets  # takes a second or two: only where it is needed
    except ImportError as error:
        raise SourceError(f"{url}: the package `datasets` is required; install padfree[service]") from error
    try:
        builder = datasets.load_dataset_builder(repo, options.get("config"), revision=options.get("revision"))
        if not local:
            _check_remote(url, builder)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=split)
    except SourceError:
        raise
    except Exception as error:  # the library raises many kinds: of the network, of files, of names
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise SourceError(
            f"{url}: `datasets` could not prepare it ({reason}); "
            "check repo, config and split, and access to the Hub"
        ) from error
    files = [Path(file["filename"]) for file in dataset.cache_files]
    if not files:
        raise SourceError(f"{url}: `datasets` keeps no files of split {split!r}; is it empty?")
    return files


def _check_remote(url: str, builder: Any) -> None:
    """A repo's own card says which files it has; refuse files of this machine."""
    listed = (getattr(builder.config, "data_files", None) or {}).values()
    for name in (str(file) for files in listed for file in files):
        if not name.startswith(("hf://", "https://")):
            raise SourceError(f"{url}: the dataset names a file outside the Hub, which is not read here")
