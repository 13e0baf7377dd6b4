"""A tiny run: a target folder, stores of its states, and a config, to be changed by a test. Brings no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hsformat.contract import Contract
from hsformat.layout import parse_capture_key
from hsformat.problems import ContractMismatch, Problem, Severity
from hsformat.record import Record
from hsformat.target import describe
from hsformat.testing import build_store, tiny_contract, tiny_record
from hsformat.testing.builders import tiny_target
from hsformat_trainer.config import TrainConfig
from hsformat_trainer.gate import admit

__all__ = ["BOTH", "contract_of", "make_config", "make_run", "make_store", "make_target", "refused"]

BOTH = ("sglang@0.5.23", "vllm@0.32.0")
AUX, LAST = ("d1", "d2", "d3"), "d4"


def make_target(folder: Path, *, eos: Sequence[int] = (2,), special: Sequence[int] = (), **config: Any) -> Path:
    """Write a target folder of ``tiny_target`` with ids that end a text and special tokens."""
    tiny_target(folder, eos_token_id=list(eos), **config)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [{"id": i, "content": f"<{i}>", "special": True} for i in special]
    path.write_text(json.dumps(tokenizer))
    return folder


def contract_of(
    target: Path,
    *,
    captures: Sequence[str] = (*AUX, LAST),
    aux: Sequence[str] = AUX,
    last: str | None = LAST,
    **changes: Any,
) -> Contract:
    """Return the contract of states of a target folder."""
    described = describe(target)
    parsed = [parse_capture_key(k) for k in captures]
    return tiny_contract(
        target=described.model.model_dump(),
        tokenizer_digest=described.tokenizer_digest,
        captures=[{"depth": d, "norm": "final" if n else "none", "dtype": "bfloat16"} for d, n in parsed],
        layout={"aux": list(aux), "last": last},
        **changes,
    )


def make_store(
    path: Path,
    contract: Contract,
    *,
    count: int = 12,
    first: int = 0,
    tokens: int = 9,
    segments: int = 2,
    records: Sequence[Record] | None = None,
) -> Path:
    """Write a store of records ``r0``, ``r1``, ... of ``tokens`` tokens and a few more."""
    made = [tiny_record(contract, f"r{i}", tokens=tokens + i % 4, seed=i) for i in range(first, first + count)]
    return build_store(path, contract, made if records is None else records, segments=segments)


def make_config(tmp: Path, **changes: Any) -> TrainConfig:
    """Return a config over ``tmp/target`` and ``tmp/data.hs.zarr``."""
    given = {
        "stores": [str(tmp / "data.hs.zarr")], "target": str(tmp / "target"), "serve": list(BOTH),
        "out": str(tmp / "out"), "held_out": "0.25", "batch_tokens": 64, "workers": 0, "precision": "fp32",
        "device": "cpu", "steps": 3, "draft_kv_heads": 2,
    }  # fmt: skip
    return TrainConfig.model_validate({**given, **changes})


def make_run(tmp: Path, **changes: Any) -> TrainConfig:
    """Write a target and a store that fit, and return the config of a run on them."""
    target = make_target(tmp / "target")
    make_store(tmp / "data.hs.zarr", contract_of(target))
    return make_config(tmp, **changes)


def refused(config: TrainConfig) -> list[Problem]:
    """Return the errors for which a run is not admitted."""
    with pytest.raises(ContractMismatch) as e:
        admit(config)
    return [p for p in e.value.problems if p.severity is Severity.ERROR]
