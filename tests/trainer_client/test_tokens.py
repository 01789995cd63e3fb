"""The bearer token: given, or PADFREE_TOKEN of the environment; a refusal says how to give it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService
from packs import build_dataset, numbered_packs

from padfree.cli import main
from trainer_client import PackedStream, StreamRefused
from trainer_client.transport import find_dataset, open_transport

TOKEN = "secret-token"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: Any) -> Iterator[FakeService]:
    monkeypatch.delenv("PADFREE_TOKEN", raising=False)
    with FakeService(tmp_path, token=TOKEN) as service:
        yield service


def test_the_token_of_the_environment_is_sent(guarded: FakeService, tmp_path: Path, monkeypatch: Any) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    monkeypatch.setenv("PADFREE_TOKEN", TOKEN)
    stream = PackedStream(guarded.url, dataset=dataset)
    assert [n for batch in stream for n in batch.example_ids.tolist()] == [0, 1, 2, 3]
    assert TOKEN.encode() not in pickle.dumps(stream)
    assert open_transport(guarded.url, dataset, token=None, timeout_s=9.0).layout().num_packs == 4
    with pytest.raises(LookupError):  # the service was asked, and let us in
        find_dataset(guarded.url, "by-name", token=None, timeout_s=9.0)


def test_a_token_that_is_given_goes_before_the_environments(
    guarded: FakeService, tmp_path: Path, monkeypatch: Any
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    monkeypatch.setenv("PADFREE_TOKEN", "other-token")
    assert len(list(PackedStream(guarded.url, dataset=dataset, token=TOKEN))) == 4
    with pytest.raises(StreamRefused, match=r"the token that was given.*is none of the service's$") as caught:
        next(iter(PackedStream(guarded.url, dataset=dataset)))
    assert "other-token" not in str(caught.value)
    with pytest.raises(StreamRefused, match="give token="):
        next(iter(PackedStream(guarded.url, dataset=dataset, token="")))


@pytest.mark.parametrize("dataset", ["0" * 32, "by-name"])
def test_a_refusal_says_how_to_give_a_token(guarded: FakeService, dataset: str, capsys: Any) -> None:
    with pytest.raises(StreamRefused, match=r"answered 401.*; give token=, or set PADFREE_TOKEN"):
        next(iter(PackedStream(guarded.url, dataset=dataset)))
    assert main(["stream", dataset, "--url", guarded.url]) == 1
    assert main(["stream", dataset, "--url", guarded.url, "--token", "other-token"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert f"{guarded.url}: a bearer token is required; give one of the service's with --token" in first
    assert "PADFREE_TOKEN" in first
    assert "the token that was given is none of its tokens" in second
    assert "other-token" not in second


@pytest.mark.parametrize("is_given", [True, False])
def test_the_end_of_line_of_a_secret_is_none_of_it(
    guarded: FakeService, tmp_path: Path, monkeypatch: Any, is_given: bool
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    text = f" {TOKEN}\r\n"
    monkeypatch.setenv("PADFREE_TOKEN", "other-token" if is_given else text)
    assert len(list(PackedStream(guarded.url, dataset=dataset, token=text if is_given else None))) == 4


@pytest.mark.parametrize("token", ["secret\ntoken", "secret token", "“secret”", "secret\x00"])
@pytest.mark.parametrize("dataset", ["0" * 32, "by-name"])
def test_a_token_that_no_header_can_carry_is_told_at_once_and_not_shown(
    guarded: FakeService, dataset: str, token: str, caplog: Any
) -> None:
    """Sent, it would be an error of the connection: tried again for ten minutes, and shown in the log."""
    with pytest.raises(ValueError, match=r"token: .*found another character at place \d+ of \d+") as caught:
        PackedStream(guarded.url, dataset=dataset, token=token)
    assert "secret" not in str(caught.value) + caplog.text
