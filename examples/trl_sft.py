"""Fine-tune with TRL's SFTTrainer on a padfree stream: nothing is tokenized, packed or collated here.

    python examples/trl_sft.py --url http://localhost:8000 --dataset ID --tokenizer examples/tokenizer

Conversations, prompts and completions were rendered by the service (spec: `format`, `loss`); SFTTrainer
gets what it would have made of them with packing and assistant_only_loss, and keeps all else: its
chunked loss, its metrics, PEFT, callbacks.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from transformers_trainer import PackedBatches
from trl import SFTConfig, SFTTrainer

# SFTTrainer insists on a data set and looks at its first row. It never trains on this one.
_NO_DATA = Dataset.from_list([{"input_ids": [0], "labels": [0]}])


class PackedSFTTrainer(PackedBatches, SFTTrainer):
    """TRL's SFTTrainer on a stream: SFTTrainer's arguments but train_dataset, and `stream`."""

    def __init__(self, *args: Any, stream: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, stream=stream, train_dataset=_NO_DATA, **kwargs)


def config(**options: Any) -> SFTConfig:
    """An SFTConfig that leaves the data alone."""
    return SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, packing=False, max_length=None, **options)


def main() -> None:
    from train_tiny import tiny_model  # here, so that this file may be copied without that one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--tokenizer", required=True, help="the folder that the dataset was packed with")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="sft-output")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    trainer = PackedSFTTrainer(
        model=tiny_model(len(tokenizer)),
        processing_class=tokenizer,
        args=config(
            output_dir=args.output,
            max_steps=args.steps,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            bf16=False,
        ),
        stream={"source": args.url, "dataset": args.dataset},
    )
    trainer.train()
    trainer.stream.close()


if __name__ == "__main__":
    main()
