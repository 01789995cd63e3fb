"""What goes over the wire as JSON, for OpenAPI. The spec itself is checked by packer.spec."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

State = Literal["queued", "packing", "ready", "failed", "cancelled"]


class ProblemModel(BaseModel):
    """RFC 9457. `detail`: what was required, what was found, what to do."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    request_id: str | None = Field(
        None, description="The answer's X-Request-Id, as the service's log has it."
    )


class DatasetView(BaseModel):
    """A dataset as it stands now."""

    model_config = ConfigDict(extra="allow")

    id: str
    name: str | None = None
    state: State
    progress: dict[str, Any] = Field(description="Counts so far; all of the dataset once it is ready.")
    report: dict[str, Any] | None = Field(None, description="Set once the dataset is ready; adds up.")
    error: dict[str, Any] | None = Field(None, description="Why packing failed: title, detail, field.")
    warnings: list[str] = Field([], description="What should be known of the spec before training on it.")
    created: str | None = Field(None, description="When it was first asked for, UTC.")
    request_id: str | None = Field(None, description="Of the request that asked for it last.")


class TokenView(BaseModel):
    id: int
    text: str
    trained: bool


class ExampleView(BaseModel):
    """A row as it would be trained, or why it cannot be used."""

    example: int
    place: str = Field(description="File and line of the row")
    num_tokens: int
    num_trained: int
    tokens: list[TokenView] = Field(description="The first 16,384 of them")
    error: str | None = None


class PreviewView(BaseModel):
    """The first examples of a spec, and warnings about its first rows."""

    examples: list[ExampleView]
    warnings: list[str]
    num_rows: int = Field(description="How many rows the warnings are about")


class DatasetList(BaseModel):
    datasets: list[DatasetView]


class UploadView(BaseModel):
    """A stored file. `upload` goes into `source.paths`."""

    upload: str
    num_bytes: int
    sha256: str


class ShardView(BaseModel):
    index: int
    num_packs: int
    num_tokens: int
    num_bytes: int
    sha256: str


class ShardPage(BaseModel):
    """Shards from `start` on, in order. Ask again with `start` = `next` until `finished`."""

    shards: list[ShardView]
    next: int = Field(description="The `start` of the next page.")
    finished: bool = Field(description="No shard comes after this page.")
    state: State
    error: dict[str, Any] | None = None


class StepPage(BaseModel):
    """Optimiser steps of a "step" dataset."""

    start: int
    num_packs: list[int] | None = Field(
        description='Packs of each from `start` on; null where the dataset\'s strategy is not "step"'
    )
    finished: bool = Field(description="No step comes after this page.")


class Balance(BaseModel):
    """How evenly the ranks of a step are loaded."""

    num_steps: int
    idle_share: dict[str, float] = Field(
        description="Share of all ranks' time spent waiting for a step's slowest, by value of `balance`"
    )


class Readiness(BaseModel):
    ready: bool = Field(description="Whether datasets can be served")
    packing: bool = Field(description="Whether datasets can be packed too")
    checks: dict[str, str] = Field(description='"ok", or what is wrong, by part')
    workers: int | None = Field(None, description="Tasks that can run at once, where this replica packs")


class SourceModel(BaseModel):
    paths: list[str]
    format: Literal["auto", "text", "prompt_completion", "messages", "tokens"] = "auto"
    fields: dict[str, str] = Field({}, description="padfree's name: the source's name")
    on_bad_row: Literal["fail", "skip"] = "fail"


class TokenizerModel(BaseModel):
    path: str
    revision: str | None = None
    chat_template: str | None = None
    add_bos: Literal["auto"] | bool = "auto"
    add_eos: Literal["auto"] | bool = "auto"


class PackingModel(BaseModel):
    strategy: Literal["best_fit", "sequential", "wrapped", "minibatch", "step", "padded"] = "best_fit"
    max_tokens: PositiveInt | list[PositiveInt] = Field(
        default=8192,
        description="What a pack holds at most; several: each example in the smallest that holds it",
    )
    overlong: Literal["truncate", "split", "drop", "error"] = "truncate"
    minibatch_size: int | None = None
    step_size: int | None = None
    segment_multiple: int = 1
    pack_multiple: int = 1
    scope: Literal["window", "global"] = "window"
    balance: Literal["none", "attention"] = "none"
    truncate_side: Literal["right", "left"] = "right"
    min_piece: int = 1


class SpecModel(BaseModel):
    """What to pack, and how. Unknown fields are refused."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "math-8k",
                    "source": {
                        "paths": ["examples/data"],
                        "fields": {"prompt": "question", "completion": "answer"},
                    },
                    "tokenizer": {"path": "examples/tokenizer"},
                    "packing": {"strategy": "best_fit", "max_tokens": 8192},
                }
            ]
        }
    )

    name: str | None = None
    source: SourceModel
    tokenizer: TokenizerModel | None = None
    loss: Literal["auto", "all", "completion", "assistant", "last_assistant"] = "auto"
    packing: PackingModel = Field(default_factory=PackingModel)
    shuffle_seed: int | None = 0


class PreviewSpecModel(SpecModel):
    """A spec, and how many examples to show."""

    examples: int = Field(default=5, ge=1, le=100)
