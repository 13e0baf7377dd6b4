"""Train an EAGLE-3 draft on a store and export it for both engines, with the Python API.

python examples/train_eagle3.py --store build/demo/data.hs.zarr --target build/demo/target --out build/example

The same as ``hsformat train`` with ``--serve sglang@0.5.23,vllm@0.32.0 --draft-vocab-size 1024 --max-steps 20``, and
``hsformat export-draft --engine both`` after it. Where the data means anything else than what the two engines will feed
the draft, the run is refused before any weight is loaded, and every reason is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import hsformat as hs
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.engines_named import parse_serve
from hsformat_trainer.gate import admit

ENGINES = ("sglang@0.5.23", "vllm@0.32.0")


def main() -> int:
    """Run the example; return 0 when the draft was trained and exported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="store to train on")
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the draft")
    parser.add_argument("--draft-vocab-size", type=int, default=1024)
    parser.add_argument("--max-steps", type=int, default=20)
    args = parser.parse_args()

    config = TrainConfig.model_validate(
        {
            "stores": [args.store],
            "target": args.target,
            "serve": list(ENGINES),
            "out": str(args.out / "run"),
            "draft_vocab_size": args.draft_vocab_size,
            "max_steps": args.max_steps,
            "batch_tokens": 1024,
            "lr": 1e-3,
        }
    )
    try:
        admitted = admit(config)  # no weight has been loaded, and torch not imported
    except hs.ContractMismatch as e:
        print(*e.problems, sep="\n")
        return 1
    print(*admitted.lines(), sep="\n")

    from hsformat_trainer.checkpoint import latest
    from hsformat_trainer.export import export_draft
    from hsformat_trainer.loop import train

    result = train(config, admitted)
    checkpoint = latest(config.out)
    if result.exit_code or checkpoint is None:
        return 1
    # Written, read back as the engines read it, and compared with the training.
    done = export_draft(checkpoint, parse_serve(ENGINES), out=args.out / "draft")
    print(f"{done.folder}: {', '.join(s.engine for s in done.servings)} feed it {list(done.servings[0].keys)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
