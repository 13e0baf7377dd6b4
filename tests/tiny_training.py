"""A tiny run, admitted by hand: python tests/tiny_training.py FOLDER '{"max_steps": 5}' [resume]

A target of width 8 and a vocabulary of 100, and records that it has written greedily: the next token is the argmax of
the last capture. The captures that the draft is fed are random, so that it can learn them by heart and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hsformat as hs
from hsformat.dtypes import numpy_dtype
from hsformat.record import Generation, Provenance
from hsformat.testing import build_store, tiny_contract, tiny_record, tiny_target
from hsformat_trainer.admitted import Admitted, Source
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.target_head import TargetHead

pytestmark = pytest.mark.needs("torch")  # nothing imports this module without it

LAYOUT = hs.Layout(aux=("d1", "d2", "d3"), last="d4")
CONTRACT = tiny_contract(layout=LAYOUT, target={"embedding": {"scale": 1.0, "tied": False}})
GREEDY = Provenance(generation=Generation(mode="greedy", max_new_tokens=100))
STEPS = 3
OPTIONS: dict[str, Any] = {
    "serve": ["vllm@0.32.0"],
    "steps": STEPS,
    "batch_tokens": 64,
    "lr": 1e-2,
    "precision": "fp32",
    "device": "cpu",
    "workers": 1,
    "log_every": 1,
    "save_every": 4,
    "eval_every": 0,
    "max_steps": 8,
}


def write_data(folder: Path, *, records: int = 24) -> None:
    """Write ``target`` and ``data.hs.zarr``."""
    target = tiny_target(folder / "target")
    head = TargetHead.load(target, CONTRACT.target, dtype=torch.float32, device="cpu")
    written = []
    for i in range(records):
        rng = np.random.default_rng(i)
        tokens = 12 + i % 9
        last = rng.standard_normal((tokens, CONTRACT.target.hidden_size)).astype(numpy_dtype("bfloat16"))
        best = head.logits(torch.from_numpy(last.astype(np.float32)), normed=False).argmax(-1).numpy()
        ids = np.concatenate([rng.integers(0, 100, 1), best[:-1]]).astype(np.int32)
        mask = np.ones(tokens, np.uint8)
        mask[:2] = 0
        written.append(
            tiny_record(
                CONTRACT,
                f"r{i}",
                tokens=tokens,
                seed=i,
                input_ids=ids,
                loss_mask=mask,
                hidden={"d4": last},
                provenance=GREEDY,
            )
        )
    build_store(folder / "data.hs.zarr", CONTRACT, written, segments=3)


def spec(**changes: Any) -> DraftSpec:
    """Return a draft of width 8."""
    sizes: dict[str, Any] = {
        "target_hidden_size": 8,
        "num_aux": 3,
        "hidden_size": 8,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "vocab_size": 100,
        "draft_vocab_size": 100,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "later_layers_norm": None,
        "train_embedding": False,
        "train_head": True,
    }
    return DraftSpec.model_validate({**sizes, **changes})


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """Return a configuration: 8 steps of about 4 records, a checkpoint after every 4."""
    paths = {"stores": [str(folder / "data.hs.zarr")], "target": str(folder / "target"), "out": str(folder / "out")}
    return TrainConfig.model_validate({**OPTIONS, **paths, **changes})


def tiny_admitted(config: TrainConfig, *, held_out: int = 4, **changes: Any) -> Admitted:
    """Return what the gate would: the last records are held out."""
    store = hs.open(config.stores[0].path)
    tokens = store.token_counts()
    rows = np.arange(len(store))
    train = rows[: len(rows) - held_out]
    source = Source(
        name=config.stores[0].path,
        source=store,
        weight=1.0,
        train=train,
        held_out=rows[len(train) :],
        train_tokens=tokens[train],
        held_out_tokens=tokens[len(train) :],
        too_long=0,
    )
    return Admitted(
        contract=store.contract,
        layout=LAYOUT,
        trained=None,  # type: ignore[arg-type] # nothing of a run looks at it
        servings=(),
        spec=spec(**changes),
        target=store.contract.target,
        target_folder=Path(config.target),
        sources=(source,),
        special_ids=(),
        origins={},
    )


def run_tiny(folder: Path, options: Mapping[str, Any], resume: bool) -> int:
    """Train as the command does, and return its exit code."""
    from hsformat.cli.output import guarded
    from hsformat_trainer.loop import train

    config = tiny_config(folder, **options)
    code = 0

    def run() -> None:
        nonlocal code
        code = train(config, tiny_admitted(config), resume=resume).exit_code

    return guarded(run) or code


if __name__ == "__main__":
    sys.exit(run_tiny(Path(sys.argv[1]), json.loads(sys.argv[2]), "resume" in sys.argv[3:]))
