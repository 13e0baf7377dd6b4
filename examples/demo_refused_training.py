"""A run that is refused: python examples/demo_refused_training.py build/demo .

The store of the demo is given with the config of a draft that both engines would feed another layer. All shapes fit, so
that nothing but the contract tells. Exits 0 if it is refused with HS401 before anything is trained, 1 otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Change the layers in the exported draft's config, and try to train on the store with it."""
    demo = Path(sys.argv[1])
    config = json.loads((demo / "draft" / "config.json").read_text("utf-8"))
    config["eagle_aux_hidden_state_layer_ids"][0] += 1  # vLLM counts depths,
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"][0] += 1  # and SGLang layers from 0
    other, out = demo / "other_layers" / "config.json", demo / "refused"
    other.parent.mkdir(exist_ok=True)
    other.write_text(json.dumps(config), "utf-8")
    command = [sys.executable, "-m", "hsformat_trainer", str(demo / "data.hs.zarr"), "--target", str(demo / "target")]
    command += ["--serve", "sglang@0.5.23,vllm@0.32.0", "--draft-config", str(other), "--out", str(out)]
    print("\nA draft that engines would feed one other layer, and the store of the demo: refused.\n", flush=True)
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    print(done.stderr)
    refused = done.returncode == 1 and "HS401" in done.stderr and not out.exists()
    print("Refused." if refused else "NOT REFUSED: this is a defect of hsformat.")
    return 0 if refused else 1


if __name__ == "__main__":
    sys.exit(main())
