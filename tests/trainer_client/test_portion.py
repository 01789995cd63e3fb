"""How many steps a request asks for: grows only while answers come at once."""

from __future__ import annotations

from trainer_client.portion import Portion


def test_answers_that_come_at_once_grow_to_any_epoch_within_few() -> None:
    portion = Portion()
    assert portion.num_steps < 100
    for _ in range(4):
        portion.came(0.01)
    assert portion.num_steps > 1_000_000
    for _ in range(100):
        portion.came(0.01)
    assert portion.num_steps <= 1 << 30  # the service takes no number without end


def test_answers_double_once_something_went_wrong() -> None:
    portion = Portion()
    portion.brought_nothing()
    portion.came(0.01)
    portion.came(0.01)
    assert portion.num_steps == 4


def test_answers_that_come_late_shrink_to_what_comes_soon() -> None:
    portion = Portion(silence_s=60)
    first = portion.num_steps
    portion.came(1.5)
    assert portion.num_steps == first
    portion.came(4)
    assert portion.num_steps == first // 4
    portion.came(50)
    portion.came(50)
    assert portion.num_steps == 1
    short = Portion(silence_s=0.8)
    short.came(0.15)
    assert short.num_steps == first


def test_a_fault_begins_anew_with_one_step() -> None:
    silent, refused = Portion(), Portion()
    silent.fell_silent()
    refused.brought_nothing()
    assert (silent.num_steps, refused.num_steps) == (1, 1)
    assert (silent.patience_s, refused.patience_s) == (120, 60)


def test_silence_is_borne_longer_each_time_until_answers_come_soon() -> None:
    portion = Portion(silence_s=1, longest_s=5)
    borne = []
    for _ in range(4):
        borne.append(portion.patience_s)
        portion.fell_silent()
    assert borne == [1, 2, 4, 5]
    portion.came(3)
    assert portion.patience_s == 5
    portion.came(0.2)
    assert portion.patience_s == 1
    portion.fell_silent()
    portion.only_waits()
    assert (portion.patience_s, portion.num_steps) == (1, 1)


def test_a_limit_shorter_than_the_first_silence_shortens_nothing() -> None:
    portion = Portion(silence_s=1, longest_s=0.5)
    portion.fell_silent()
    assert portion.patience_s == 1
