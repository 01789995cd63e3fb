"""The coordinator's window as a pure state machine: any completion order, any failures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.window import MAX_TRIES, Window


@given(
    total=st.integers(0, 30),
    size=st.integers(1, 8),
    committed=st.integers(0, 30),
    stumble=st.sets(st.integers(0, 29)),
    seed=st.integers(0, 10_000),
)
def test_any_completion_order_commits_in_order_within_the_window(
    total: int, size: int, committed: int, stumble: set[int], seed: int
) -> None:
    rng, committed = random.Random(seed), min(committed, total)
    window = Window(total=total, size=size, committed=committed)
    running: list[int] = []
    order: list[int] = []
    while not window.done:
        running += window.to_start()
        assert len(set(running)) == len(running)
        assert all(window.committed <= p < window.committed + size for p in running)
        done = running.pop(rng.randrange(len(running)))
        if done in stumble:
            stumble.discard(done)
            assert window.stumbled(done, RuntimeError("died"))
        else:
            window.succeeded(done, f"result {done}")
        order += [p for p, result in window.to_commit() if result == f"result {p}"]
    assert order == list(range(committed, total))


@given(
    total=st.integers(1, 20),
    size=st.integers(1, 6),
    bad=st.sets(st.integers(0, 19), min_size=1),
    seed=st.integers(),
)
def test_the_first_failure_in_partition_order_is_the_one_told(
    total: int, size: int, bad: set[int], seed: int
) -> None:
    bad = {p % total for p in bad}
    rng, window, running = random.Random(seed), Window(total=total, size=size), []
    while window.failure() is None:
        running += window.to_start()
        done = running.pop(rng.randrange(len(running)))
        if done in bad:
            window.failed(done, ValueError(str(done)))
        else:
            window.succeeded(done, done)
        window.to_commit()
    assert str(window.failure()) == str(min(bad))
    assert window.committed == min(bad)


def test_a_partition_that_always_kills_its_worker_fails_after_its_tries() -> None:
    window = Window(total=2, size=2)
    window.to_start()
    window.succeeded(1, "later")
    for _ in range(MAX_TRIES - 1):
        assert window.stumbled(0, RuntimeError("killed"))
        assert window.to_start() == [0]
    assert not window.stumbled(0, RuntimeError("killed"))
    assert window.to_commit() == []
    assert str(window.failure()) == "killed"


@pytest.mark.parametrize("wrong", [{"committed": 3}, {"size": 0}])
def test_a_window_that_would_never_be_done_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="required, found"):
        Window(**{"total": 2, "size": 2, **wrong})
    Window(total=0, size=0)  # nothing to do is done
