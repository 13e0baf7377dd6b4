"""How the golden stores were made: python tests/golden/make.py tests/golden/1.0 .

A golden store is never made again for a version that was released: readers of every later version must read these
very bytes. Until hsformat 1.0.0 is released the format is a draft, and a change of it (CHANGELOG.md, "Format") makes
them anew.

Two stores, ``compact`` and ``fast``, of the same five records: given and generated (T - 1 and T states), with other
positions, with fields on both axes, ids beyond ASCII, every kind of capture; three segments of two writers.
``expected.json`` says what a reader must find, by value or by SHA-256 of the little-endian bytes; positions of null are
0..T-1.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hsformat as hs
from hsformat.dtypes import numpy_dtype

IDS = (("first", 1), ("zweite-\u00fc", 300), ("generated-cut", 40), ("\u56db", 17), ("generated-whole", 9))
"""Ids and numbers of tokens; the second writer writes the last one."""


def digest(fill: str) -> str:
    return f"sha256:{fill * 64}"


def contract() -> hs.Contract:
    return hs.Contract(
        spec_version="1.0",
        target=hs.TargetModel(
            name="golden",
            revision="r1",
            architecture="LlamaForCausalLM",
            num_layers=4,
            hidden_size=6,
            vocab_size=1000,
            dtype="bfloat16",
            quantization=None,
            embedding=hs.Embedding(scale=1.0, tied=False),
            head=hs.Head(bias=False, softcap=30.0, scale=0.5, padded_vocab=1024),
            final_norm=hs.FinalNorm(kind="rmsnorm", eps=1e-6, unit_offset=True),
            rope=(hs.Rope(applies_to="all", kind="llama3", theta=500000.0, rotary_dim=2, parameters={"factor": 8.0}),),
            config_digest=digest("a"),
            basis_digest=digest("b"),
            weights_digest=digest("c"),
        ),
        tokenizer_digest=digest("d"),
        captures=(
            hs.Capture(depth=0, norm="none", dtype="bfloat16"),
            hs.Capture(depth=2, norm="none", dtype="float16"),
            hs.Capture(depth=4, norm="none", dtype="float32"),
            hs.Capture(depth=4, norm="final", dtype="bfloat16"),
        ),
        positions="1d",
        codec="compact",
        fields=(
            hs.FieldSpec(name="logprob", axis="token", dtype="float32", shape=(2,), must_understand=False),
            hs.FieldSpec(name="score", axis="record", dtype="int16", shape=(), must_understand=False),
            hs.FieldSpec(name="teacher", axis="record", dtype="bfloat16", shape=(2, 3), must_understand=True),
            hs.FieldSpec(name="keep", axis="token", dtype="bool", shape=(), must_understand=False),
        ),
        layout=hs.Layout(aux=("d2", "d0"), last="d4"),
    )


def records(c: hs.Contract) -> list[hs.Record]:
    rng = np.random.default_rng(20261129)
    sampled = hs.Generation(mode="sampled", max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=50, seed=3)
    out = []
    for i, (record_id, tokens) in enumerate(IDS):
        generated = record_id.startswith("generated")
        states = tokens - 1 if record_id == "generated-cut" else tokens
        mask = np.zeros(tokens, np.uint8)
        mask[tokens // 2 :] = 1
        out.append(
            hs.Record(
                id=record_id,
                input_ids=rng.integers(0, 1000, tokens),
                loss_mask=mask,
                hidden={k.key: (rng.standard_normal((states, 6)) * 3).astype(numpy_dtype(k.dtype)) for k in c.captures},
                position_ids=np.arange(tokens) + 5 if i == 3 else None,
                fields={
                    "logprob": -rng.random((tokens, 2), np.float32),
                    "score": np.int16(i - 2),
                    "teacher": rng.standard_normal((2, 3)).astype(numpy_dtype("bfloat16")),
                    "keep": rng.random(tokens) < 0.5,
                },
                provenance=hs.Provenance(
                    generation=sampled if generated else hs.Generation(mode="none"),
                    template_digest=digest("e") if i else None,
                    template_kwargs={"enable_thinking": False} if i == 1 else {},
                ),
                source_digest=digest(str(i)) if i else None,
            )
        )
    # Bit patterns that a careless reader loses: negative zero, the smallest subnormal, the largest finite number.
    edge = out[1].hidden["d0"].view(np.uint16)
    edge[7, :3] = (0x8000, 0x0001, 0x7F7F)
    return out


def expected(store: hs.Store) -> dict[str, Any]:
    def sha(array: np.ndarray) -> str:
        return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()

    return {
        "contract": store.contract.to_json(),
        "compatibility_digest": store.contract.compatibility_digest,
        "records": [
            {
                "id": r.id,
                "input_ids": r.input_ids.tolist(),
                "loss_mask": r.loss_mask.tolist(),
                "position_ids": None if r.position_ids is None else r.position_ids.tolist(),
                "hidden": {k: {"shape": list(h.shape), "sha256": sha(h)} for k, h in r.hidden.items()},
                "fields": {
                    k: {"dtype": f.dtype.name, "shape": list(f.shape), "sha256": sha(f)} for k, f in r.fields.items()
                },
                "provenance": r.provenance.model_dump(mode="json"),
                "source_digest": r.source_digest,
            }
            for r in store
        ],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    for codec in ("compact", "fast"):
        path = folder / f"{codec}.hs.zarr"
        *most, last = records(contract())
        with hs.create(path, contract(), codec=codec, producer={"name": "golden"}) as writer:
            for i, record in enumerate(most):
                writer.append(record)
                if i == 1:
                    writer.flush()
        with hs.append(path) as writer:
            writer.append(last)
        store = hs.open(path, understands=["teacher"])
        (folder / f"{codec}.expected.json").write_text(json.dumps(expected(store), indent=1) + "\n")


if __name__ == "__main__":
    main()
