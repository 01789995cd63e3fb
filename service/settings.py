"""How a service runs: frozen settings from the environment and from arguments.

Every field has an environment variable: `PADFREE_` and the field's name in capitals. Arguments win over
the environment. Errors: SettingsError, which names the variable.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packer.store import is_url

_PREFIX = "PADFREE_"


class SettingsError(ValueError):
    """A setting is wrong; the text names it and says what is required and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a service is told at its start."""

    store: str  # a folder, or s3://BUCKET/PREFIX or gs://BUCKET/PREFIX
    data_roots: tuple[Path, ...] = ()  # folders that `source.paths` may lie in; none: the working folder
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    tokens: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # bearer tokens; none: no check
    packing: bool = True  # false: a replica that only serves what is in the store
    ray_address: str | None = None  # of a Ray cluster; None: a Ray of our own, in this process
    workers: int | None = None  # CPUs of our own Ray; None: all, 0: no Ray, pack in this process
    max_jobs: int = 2  # datasets packed at the same time
    max_spec_bytes: int = 4 << 20
    max_upload_bytes: int = 64 << 30
    max_chunk_bytes: int = 1 << 20  # of a stream, at once; fits a core's cache
    max_buffer_bytes: int = 256 << 20  # chunks of all open streams together
    shutdown_s: float = 5.0  # for requests and jobs to end in, after SIGTERM
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        for name, least in (("max_jobs", 1), ("max_spec_bytes", 1), ("max_chunk_bytes", 4096)):
            if getattr(self, name) < least:
                raise _wrong(name, f"{least} or more", getattr(self, name))
        if not 0 <= self.port <= 65535:
            raise _wrong("port", "a port from 0 to 65535", self.port)
        if self.workers is not None and self.workers < 0:
            raise _wrong("workers", "0 or more", self.workers)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
        """Settings from `PADFREE_*` (of `environ`, or the process's); `arguments` win."""
        environ = os.environ if environ is None else environ
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {"store": "padfree-store"}
        for item in dataclasses.fields(cls):
            text = environ.get(_PREFIX + item.name.upper(), "").strip()
            if text:
                values[item.name] = _parse(item.name, hints[item.name], text)
        values |= arguments
        if not is_url(values["store"]):
            values["store"] = str(Path(values["store"]).absolute())
        values["data_roots"] = tuple(
            Path(root).absolute() for root in values.get("data_roots") or (Path.cwd(),)
        )
        return cls(**values)


def _parse(name: str, hint: Any, text: str) -> Any:
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        parts = text.split("," if of is str else os.pathsep)
        return tuple(of(part.strip()) for part in parts if part.strip())
    if typing.get_origin(hint) is Literal:
        if text.lower() not in typing.get_args(hint):
            raise _wrong(name, f"one of {', '.join(typing.get_args(hint))}", text)
        return text.lower()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = typing.get_args(hint)[0]
    if hint is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise _wrong(name, "0, 1, true or false", text)
        return text.lower() in ("1", "true")
    try:
        return hint(text)
    except ValueError:
        raise _wrong(name, {int: "a whole number", float: "a number"}.get(hint, str(hint)), text) from None


def _wrong(name: str, required: str, found: Any) -> SettingsError:
    return SettingsError(f"{_PREFIX}{name.upper()}: {required} is required, found {found!r}")
