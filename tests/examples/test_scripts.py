"""Each example as its first lines say it is run."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
import toy
from accelerate.state import AcceleratorState
from packing_job import write_tokenizer
from training import MINIBATCH, VOCAB_SIZE, pack_rows, rows_of

from trainer_client import PackedStream

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("train_tiny", "--steps 2 --vocab-size SIZE", "2 steps, loss"),
        ("transformers_trainer", "--steps 2 --vocab-size SIZE --output OUT", "train_loss"),
        ("trl_sft", "--steps 2 --tokenizer TOKENIZER --output OUT", "mean_token_accuracy"),
        ("accelerate_loop", "--steps 2 --accumulate 2 --vocab-size SIZE --checkpoint OUT", "2 steps, loss"),
        ("lightning_module", "--steps 2 --vocab-size SIZE", ""),
        ("lightning_module", "--steps 2 --vocab-size SIZE --checkpoints OUT", ""),
        ("evaluation", "--vocab-size SIZE", "12 examples"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_runs_as_a_script(
    name: str,
    extra: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", toy.bundle())
    values = {"SIZE": str(VOCAB_SIZE), "OUT": str(tmp_path / "out"), "TOKENIZER": str(tokenizer)}
    arguments = [values.get(word, word) for word in extra.split()]
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(sys, "argv", [name, "--url", str(tmp_path), "--dataset", dataset, *arguments])
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    importlib.import_module(name).main()
    assert said in capsys.readouterr().out
    assert not list(working.iterdir())  # nothing is left in a checkout
    assert ("OUT" in extra) == (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["transformers_trainer"], "PackedTrainer"),
        (["trl_sft", "transformers_trainer"], "PackedSFTTrainer"),
        (["accelerate_loop"], "main"),
        (["lightning_module"], "PackedData"),
        (["evaluation"], "evaluate"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_can_be_copied_without_the_others(
    names: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(one for one in sys.path if one != str(EXAMPLES))])
    for name in [*names, "train_tiny"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    copied = importlib.import_module(names[0])
    assert Path(str(copied.__file__)).parent == tmp_path
    assert hasattr(copied, wanted)
    for name in names:  # other tests take those of examples/
        del sys.modules[name]


def test_too_small_a_vocabulary_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    largest = max(int(batch.input_ids.max()) for batch in PackedStream(tmp_path, dataset=dataset))
    arguments = ["--url", str(tmp_path), "--dataset", dataset, "--steps", "2", "--vocab-size"]
    monkeypatch.setattr(sys, "argv", ["train_tiny", *arguments, "8"])
    with pytest.raises(ValueError, match=r"--vocab-size: .* at least \d+, found 8; give the size of the tok"):
        importlib.import_module("train_tiny").main()
    monkeypatch.setattr(sys, "argv", ["train_tiny", *arguments, str(largest + 1)])
    importlib.import_module("train_tiny").main()
