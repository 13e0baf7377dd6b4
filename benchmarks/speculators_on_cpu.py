"""One measured run of the trainer of speculators 0.9 on a CPU; ``trainer_peers.py`` starts it, in speculators' Python.

    PYTHON benchmarks/speculators_on_cpu.py write DATA                       # DATA/rows.json -> an Arrow dataset
    PYTHON benchmarks/speculators_on_cpu.py train OUT WARMUP STEPS -- ARGUMENTS OF "speculators train" ...

speculators 0.9 does not run on a CPU as it is. Three things are replaced here in the running process, nothing of its
training step: the number of the device, which it takes for 0 (CUDA's), and the type of the device, which it takes
for "cuda" where there is no accelerator (its autocast would then be off); ``torch.accelerator.synchronize``, which
raises without one. Its flex attention has no backward on a CPU and its fused losses need Triton: options of its own
replace them (``--draft-attn-impl``, ``--loss-implementation eager``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from step_marks import Marks


def write(data: Path) -> None:
    """Write the dataset beside the hidden states, with the columns and types of speculators' own preparation."""
    from datasets import Dataset

    rows = json.loads((data / "rows.json").read_text())
    dataset = Dataset.from_dict(rows)
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(data))


def train(marks: Marks, arguments: list[str]) -> None:
    """Run ``speculators train`` with the patches, and a mark after each optimizer step."""
    torch.accelerator.synchronize = lambda *_: None
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    trainer.get_local_rank = lambda: "cpu"

    class Marked(trainer.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.device_type = "cpu"
            self.model.register_forward_pre_hook(self._see, with_kwargs=True)
            trained = [p for p in self.model.parameters() if p.requires_grad]
            marks.facts = {
                "trained_parameters": sum(p.numel() for p in trained),
                "threads": torch.get_num_threads(),
                "dtypes": sorted({str(p.dtype) for p in trained}),
            }

        def _see(self, module: torch.nn.Module, args: Any, batch: dict[str, Any]) -> None:
            """Count what goes in: each record has lost one row by the shift, and padding has document -1."""
            documents, mask = batch["document_ids"], batch["loss_mask"]
            self.tokens = int((documents != -1).sum()) + int(documents.max()) + 1
            self.supervised = [int(mask[:, k:].sum()) for k in range(batch["ttt_steps"])]

        def train_epoch(self, epoch: int, **_: Any) -> None:
            super().train_epoch(epoch, step_callback=lambda: marks.step(tokens=self.tokens, supervised=self.supervised))

    cli.Trainer = Marked
    cli.main(TrainConfig.resolve(arguments))


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "write":
        write(Path(rest[0]))
    else:
        out, warmup, steps, _, *arguments = rest
        train(Marks(Path(out), warmup=int(warmup), steps=int(steps)), arguments)


if __name__ == "__main__":
    main()
