"""What a user calls a dataset: ids, their beginnings, names."""

import pytest
from packs import build_dataset, numbered_packs

from packer import names
from packer.manifest import cancelled_key
from packer.names import AmbiguousName, UnknownName, choose, find_dataset
from packer.store import LocalStore

A, B, C = "aaaa1" + 27 * "0", "aaaa2" + 27 * "0", "cafe" + 28 * "0"
NAMES = {A: "math", B: "code", C: None}


@pytest.mark.parametrize(
    ("text", "found"), [(A, A), ("math", A), ("aaaa2", B), ("cafe", C), ("code", B), ("cafe00", C)]
)
def test_an_id_its_beginning_or_a_name(text, found):
    assert choose(text, NAMES) == found


@pytest.mark.parametrize("text", ["aaa", "caf", "Math", "", "beef", A[:-1] + "1", "CAFE", "no\x1bbody"])
def test_what_nobody_is_called_is_unknown(text):
    with pytest.raises(UnknownName, match="beginning of one") as told:
        choose(text, NAMES)
    assert "\x1b" not in str(told.value)


def test_a_name_that_is_nearly_right_is_offered():
    with pytest.raises(UnknownName, match="did you mean 'math'"):
        choose("maths", NAMES)


def test_what_may_be_several_is_listed():
    with pytest.raises(AmbiguousName, match=rf"one of 2 datasets.*: {A} \(math\); {B} \(code\)"):
        choose("aaaa", NAMES)
    with pytest.raises(AmbiguousName, match="one of 2 datasets"):
        choose("math", {**NAMES, B: "math"})
    many = {f"{number:032x}": "same" for number in range(30)}
    with pytest.raises(AmbiguousName, match=r"one of 30 datasets.* and 20 more"):
        choose("same", many)


def test_a_name_means_the_one_dataset_of_it_that_did_not_fail():
    names_ = {A: "messy", B: "messy", C: "messy"}
    states = {A: "failed", B: "ready", C: "cancelled"}
    assert choose("messy", names_, state_of=states.get) == B
    with pytest.raises(AmbiguousName, match=rf"{A} \(messy, failed\); {B} \(messy, ready\)"):
        choose("messy", names_, state_of=states.get, prefer_usable=False)
    with pytest.raises(AmbiguousName, match="messy, packing"):
        choose("messy", names_, state_of={**states, C: "packing"}.get)
    with pytest.raises(AmbiguousName, match="messy, failed"):
        choose("messy", names_, state_of=lambda _: "failed")
    with pytest.raises(AmbiguousName):  # the beginning of an id is nobody's name
        choose("aaaa", names_, state_of=states.get)


def test_states_of_the_store_decide_between_equal_names(tmp_path):
    store = LocalStore(tmp_path)
    first, second = (
        build_dataset(tmp_path, numbered_packs(count), packs_per_shard=2, name="same") for count in (2, 3)
    )
    with pytest.raises(AmbiguousName, match="same, ready"):
        find_dataset(store, "same")
    store.put(cancelled_key(first), b"{}")
    assert find_dataset(store, "same") == second


def test_a_whole_id_wins_and_a_beginning_does_not():
    assert choose(A, {**NAMES, B: A}) == A
    with pytest.raises(AmbiguousName):
        choose("cafe", {**NAMES, A: "cafe"})
    assert choose("cafe", {**NAMES, C: "cafe"}) == C


def test_names_are_read_once_and_forgotten_with_their_dataset(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    dataset = build_dataset(tmp_path, numbered_packs(2), packs_per_shard=2)
    known: dict[str, str | None] = {"0" * 32: "gone"}
    assert find_dataset(store, dataset[:8], known) == dataset
    assert set(known) == {dataset}
    monkeypatch.setattr(store, "get", None)  # not asked again
    assert find_dataset(store, dataset[:8], known) == dataset
    assert names.is_id(dataset)
