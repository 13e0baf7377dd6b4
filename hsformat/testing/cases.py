"""The conformance cases of spec 1.0 as JSON, for implementations in any language (docs/spec/cases/1.0/README.md).

``python -m hsformat.testing.cases`` writes them below the working directory; so does ``make docs``. What a case expects
is written here by hand or by a plain definition (loops for the mask rules), and never asked of the code that is tested:
tests/conformance/test_cases.py runs them against hsformat, and what it can against a reader that was written from the
specification alone. May import the core's models and ``testing.builders``.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785

from hsformat.dtypes import numpy_dtype
from hsformat.testing.builders import digest, tiny_contract

__all__ = ["FOLDER", "case_files", "main"]

FOLDER = Path("docs/spec/cases/1.0")

FIELD = {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": True}
SCORE = {"name": "score", "axis": "record", "dtype": "int16", "shape": [2], "must_understand": False}
YARN = {"applies_to": "full_attention", "kind": "yarn", "theta": 1e6, "rotary_dim": 4, "parameters": {"factor": 4.0}}
SLIDING = {"applies_to": "sliding_attention", "kind": "default", "theta": 1e4, "rotary_dim": 4, "parameters": {}}
NORMED = {"depth": 4, "norm": "final", "dtype": "float32"}
REMOVED = object()

Json = dict[str, Any]


def base() -> Json:
    """Return the contract that the cases begin with: 4 layers, hidden size 8, captures d1 to d4, last d4."""
    return tiny_contract().to_json()


def edited(path: str, value: Any, start: Json | None = None) -> Json:
    """Return a contract with one member set, or removed; ``path`` has dots, and numbers for entries of arrays."""
    data = copy.deepcopy(base() if start is None else start)
    at: Any = data
    *front, name = path.split(".")
    for key in front:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is REMOVED:
        del at[name]
    else:
        at[int(name) if isinstance(at, list) else name] = value
    return data


def _valid_contracts() -> Iterator[tuple[str, Json]]:
    yield "base", base()
    yield "codec fast", edited("codec", "fast")
    yield "no last capture", edited("layout.last", None)
    yield "aux in another order", edited("layout.aux", ["d3", "d1"])
    yield "aux is last, too", edited("layout.aux", ["d4"])
    yield "last after the final norm", edited("layout.last", "d4n", edited("captures", [*base()["captures"], NORMED]))
    yield (
        "softcap and scale",
        edited("target.head", {"bias": True, "softcap": 30.0, "scale": 0.0625, "padded_vocab": 128}),
    )
    yield "quantised target", edited("target.quantization", "fp8")
    yield "no rope", edited("target.rope", [])
    yield "two kinds of rope", edited("target.rope", [SLIDING, YARN])
    yield "weights digest", edited("target.weights_digest", digest("f"))
    yield "fields", edited("fields", [SCORE, FIELD])
    yield "field without shape", edited("fields", [{k: v for k, v in FIELD.items() if k != "shape"}])
    yield "text beyond ASCII", edited("target.name", "ü四\u2028")


INVALID_CONTRACTS: tuple[tuple[str, str, str, Any], ...] = (
    ("C-1", "surprise", "surprise", 1),
    ("C-1", "tokenizer_digest", "tokenizer_digest", REMOVED),
    ("C-1", "layout", "layout", REMOVED),
    ("C-1", "target.head.softcap", "target.head.softcap", REMOVED),
    ("C-1", "target.head.extra", "target.head.extra", 1),
    ("C-1", "target.revision", "target.revision", REMOVED),
    ("C-1", "captures.0.extra", "captures.0.extra", 1),
    ("C-2", "spec_version", "spec_version", "9.0"),
    ("C-2", "spec_version", "spec_version", REMOVED),
    ("C-3", "target.num_layers", "target.num_layers", 0),
    ("C-3", "target.num_layers", "target.num_layers", True),
    ("C-3", "target.hidden_size", "target.hidden_size", "8"),
    ("C-3", "target.name", "target.name", ""),
    ("C-3", "target.dtype", "target.dtype", "float64"),
    ("C-3", "target.head.softcap", "target.head.softcap", 0.0),
    ("C-3", "target.embedding.scale", "target.embedding.scale", -1.0),
    ("C-3", "target.final_norm.kind", "target.final_norm.kind", "unknown"),
    ("C-3", "target", "target.head.padded_vocab", 50),
    ("C-3", "target", "target.rope", [SLIDING, SLIDING]),
    ("C-4", "captures", "captures", []),
    ("C-4", "captures", "captures.1.depth", 1),
    ("C-4", "captures", "captures.0.depth", 3),
    ("C-4", "captures.0.dtype", "captures.0.dtype", "float8"),
    ("C-4", "captures.0.norm", "captures.0.norm", "post"),
    ("C-4", "captures.0.depth", "captures.0.depth", -1),
    ("C-5", "contract", "captures.3.depth", 5),
    ("C-5", "contract", "captures.2.norm", "final"),
    ("C-6", "contract", "layout.aux", ["d0", "d1"]),
    ("C-6", "layout", "layout.aux", ["d1", "d1"]),
    ("C-6", "layout.aux", "layout.aux", []),
    ("C-6", "layout.aux.0", "layout.aux", ["1"]),
    ("C-6", "layout.aux.0", "layout.aux", ["d01"]),
    ("C-7", "contract", "layout.last", "d3"),
    ("C-8", "positions", "positions", "mrope"),
    ("C-9", "codec", "codec", "zip"),
    ("C-10", "contract", "fields", [FIELD, FIELD]),
    ("C-10", "fields.0.name", "fields", [{**FIELD, "name": "Weight"}]),
    ("C-10", "fields.0.axis", "fields", [{**FIELD, "axis": "layer"}]),
    ("C-10", "fields.0.dtype", "fields", [{**FIELD, "dtype": "uint16"}]),
    ("C-10", "fields.0.shape.0", "fields", [{**FIELD, "shape": [0]}]),
    ("C-10", "fields.0.shape", "fields", [{**FIELD, "shape": [1] * 31}]),
    ("C-12", "tokenizer_digest", "tokenizer_digest", "md5:00"),
    ("C-12", "target.basis_digest", "target.basis_digest", digest("A")),
    ("C-12", "target.config_digest", "target.config_digest", f"{digest('1')}\n"),
)
"""Rule, the member that the problem names, and the change to the base contract."""


def contracts() -> Iterator[Json]:
    """Yield valid contracts, and invalid ones with rule, code and the member that is named."""
    for name, contract in _valid_contracts():
        yield {"name": name, "contract": contract, "code": None}
    for i, (rule, member, path, value) in enumerate(INVALID_CONTRACTS):
        name = f"{rule} {i}: {path} {'missing' if value is REMOVED else json.dumps(value)[:40]}"
        yield {"name": name, "rule": rule, "contract": edited(path, value), "code": "HS502", "member": member}


def digests() -> Iterator[Json]:
    """Yield contracts with their digest and their compatibility digest, and JSON with its canonical form."""

    def sha(value: Any) -> str:
        return f"sha256:{hashlib.sha256(rfc8785.dumps(value)).hexdigest()}"

    for name, contract in _valid_contracts():
        whole = copy.deepcopy(contract)
        for field in whole["fields"]:
            field.setdefault("shape", [])
        means = copy.deepcopy(whole)
        del means["layout"], means["codec"], means["target"]["name"], means["target"]["revision"]
        means["fields"] = sorted((f for f in means["fields"] if f["must_understand"]), key=lambda f: str(f["name"]))
        means["target"]["rope"].sort(key=lambda r: str(r["applies_to"]))
        yield {"name": name, "contract": contract, "digest": sha(whole), "compatibility_digest": sha(means)}
    for name, value, canonical in (
        (
            "members are sorted by UTF-16",
            {"\u20ac": 1, "\U0001f600": 2, "\ufb33": 3},
            '{"\u20ac":1,"\U0001f600":2,"\ufb33":3}',
        ),
        ("whole numbers have no fraction", [1.0, 1e21, -0.0, 4.5], "[1,1e+21,0,4.5]"),
        ("shortest form", [1e-7, 0.1, 1e-5, 5e-324], "[1e-7,0.1,0.00001,5e-324]"),
        ("escapes", ['\u0000\n"\\/é'], '["\\u0000\\n\\"\\\\/é"]'),
    ):
        text = canonical.encode()
        yield {"name": name, "json": value, "canonical_hex": text.hex(),
               "digest": f"sha256:{hashlib.sha256(text).hexdigest()}"}  # fmt: skip


def record(contract: Json, tokens: int = 4, states: int | None = None) -> Json:
    """Return a valid record in JSON form: lists, and states as hex of their little-endian bytes."""
    rng, h = np.random.default_rng(tokens), contract["target"]["hidden_size"]
    rows = tokens if states is None else states
    hidden = {}
    for c in contract["captures"]:
        x = rng.standard_normal((rows, h)).astype(numpy_dtype(c["dtype"]))
        hidden[f"d{c['depth']}{'n' if c['norm'] == 'final' else ''}"] = array(x)
    fields = {f["name"]: array(np.ones(((tokens,) if f["axis"] == "token" else ()) + tuple(f["shape"]), f["dtype"]))
              for f in contract["fields"]}  # fmt: skip
    return {
        "id": "r0", "input_ids": list(range(tokens)), "loss_mask": [0] * (tokens // 2) + [1] * (tokens - tokens // 2),
        "position_ids": None, "hidden": hidden, "fields": fields,
        "provenance": {"generation": {"mode": "none", "max_new_tokens": None, "temperature": None, "top_p": None,
                                      "top_k": None, "seed": None},
                       "template_digest": None, "template_kwargs": {}},
        "source_digest": None,
    }  # fmt: skip


def array(x: Any) -> Json:
    """Return an array in JSON form."""
    return {"dtype": x.dtype.name, "shape": list(x.shape), "hex": x.tobytes().hex()}


def _states(
    value: float | None = None, *, dtype: str = "bfloat16", shape: tuple[int, int] = (4, 2), at: int = 3
) -> Json:
    x = np.arange(1, 1 + shape[0] * shape[1], dtype=np.float32).reshape(shape)
    if value is not None:
        x.flat[at] = value
    return array(x.astype(numpy_dtype(dtype)))


def _greedy(r: Json) -> Json:
    return {**r["provenance"], "generation": {**r["provenance"]["generation"], "mode": "greedy", "max_new_tokens": 2}}


def records() -> Iterator[Json]:
    """Yield records under one of two contracts, valid (codes empty) and invalid (the codes of all errors, sorted)."""
    small = edited("target.hidden_size", 2, edited("captures", base()["captures"][2:]))
    small["layout"] = {"aux": ["d3"], "last": "d4"}
    fielded = {**small, "fields": [FIELD, SCORE]}
    half = edited("captures.0.dtype", "float16", small)
    r = record(small)

    def case(name: str, codes: list[str], change: Mapping[str, Any] | None = None, contract: Json = small) -> Json:
        start = record(contract)
        return {"name": name, "contract": contract, "record": {**start, **(change or {})}, "codes": codes}

    def hidden(**changes: Json | None) -> Json:
        return {"hidden": {k: v for k, v in {**r["hidden"], **changes}.items() if v is not None}}

    zeros = array(np.zeros((4, 2), numpy_dtype("bfloat16")))
    short = record(small, states=3)["hidden"]
    yield case("given, T states", [])
    yield case("generated, T states", [], {"provenance": _greedy(r)})
    yield case("generated, T - 1 states", [], {"provenance": _greedy(r), "hidden": short})
    yield case("positions that rest", [], {"position_ids": [5, 5, 6, 9]})
    yield case("id beyond ASCII", [], {"id": "zweite-ü-四"})
    yield case("id of 1,024 bytes", [], {"id": "é" * 512})
    yield case("fields on both axes", [], contract=fielded)
    yield case("negative zero and the smallest number", [], hidden(d3=_states(-0.0)))
    yield case("largest number of bfloat16", [], hidden(d3=_states(3.3895313892515355e38)))
    yield case("given, T - 1 states", ["HS101"], {"hidden": short})
    yield case(
        "generated, T - 2 states", ["HS101"], {"provenance": _greedy(r), "hidden": record(small, states=2)["hidden"]}
    )
    yield case("mask too long", ["HS101"], {"loss_mask": [0, 0, 1, 1, 1]})
    yield case("one capture shorter", ["HS101"], hidden(d4=_states(shape=(3, 2))))
    yield case(
        "field of another shape",
        ["HS101"],
        {"fields": {**record(fielded)["fields"], "score": array(np.ones(3, np.int16))}},
        fielded,
    )
    yield case("no state", ["HS102"], {"hidden": record(small, states=0)["hidden"]})
    yield case("nothing supervised", ["HS103"], {"loss_mask": [0, 0, 0, 0]})
    yield case("mask of 2", ["HS104"], {"loss_mask": [0, 0, 1, 2]})
    yield case("token of the vocabulary's size", ["HS105"], {"input_ids": [0, 1, 2, 100]})
    yield case("ignored index", ["HS105"], {"input_ids": [-100, 1, 2, 3]})
    yield case("positions that fall", ["HS106"], {"position_ids": [0, 1, 0, 1]})
    yield case("negative position", ["HS106"], {"position_ids": [-1, 0, 1, 2]})
    yield case("empty id", ["HS107"], {"id": ""})
    yield case("id of 1,025 bytes", ["HS107"], {"id": "é" * 512 + "x"})
    yield case("capture missing", ["HS109"], hidden(d3=None))
    yield case("capture too many", ["HS109"], hidden(d2=_states()))
    yield case("field missing", ["HS109"], {"fields": {}}, fielded)
    yield case("NaN", ["HS201"], hidden(d3=_states(float("nan"))))
    yield case("infinity in the last row", ["HS201"], hidden(d4=_states(float("-inf"), at=7)))
    yield case("zeros", ["HS202"], hidden(d4=zeros))
    yield case("65536 as float16", ["HS207"], hidden(d3=_states(65536.0, dtype="float32")), half)
    yield case("65504 as float16", [], hidden(d3=_states(65504.0, dtype="float32")), half)
    yield case("source digest", [], {"source_digest": f"sha256:{'a' * 64}"})
    yield case("source digest of another form", ["HS604"], {"source_digest": "md5:00"})
    yield case("another width", ["HS409"], hidden(d3=_states(shape=(4, 3))))
    yield case("two faults are two problems", ["HS103", "HS201"],
               {"loss_mask": [0, 0, 0, 0], **hidden(d3=_states(float("nan")))})  # fmt: skip


def compare() -> Iterator[Json]:
    """Yield a contract and a layout that a draft is fed, or another contract, with the codes of all errors, sorted."""
    served: tuple[tuple[str, Json, list[str]], ...] = (
        ("the layout extracted for", {"aux": ["d1", "d2", "d3"], "last": "d4"}, []),
        ("a draft that needs no last", {"aux": ["d1", "d2", "d3"], "last": None}, []),
        ("another order", {"aux": ["d3", "d2", "d1"], "last": "d4"}, ["HS401"]),
        ("every slot one deeper", {"aux": ["d2", "d3", "d4"], "last": "d4"}, ["HS401"]),
        ("the embedding, which is not stored", {"aux": ["d0", "d1", "d2"], "last": "d4"}, ["HS109", "HS401"]),
        ("fewer captures", {"aux": ["d1", "d2"], "last": "d4"}, ["HS401", "HS402"]),
        ("last after the norm, not stored", {"aux": ["d1", "d2", "d3"], "last": "d4n"}, ["HS109", "HS405"]),
        ("last of another depth", {"aux": ["d1", "d2", "d3"], "last": "d3"}, ["HS401"]),
    )
    for name, layout, codes in served:
        yield {"name": name, "contract": base(), "layout": layout, "codes": codes}
    others: tuple[tuple[str, str, Any, list[str]], ...] = (
        ("itself", "codec", "compact", []),
        ("another name", "target.name", "other", []),
        ("another revision", "target.revision", "r2", []),
        ("another codec", "codec", "fast", []),
        ("another layout", "layout.aux", ["d2"], []),
        ("a field that need not be understood", "fields", [SCORE], []),
        ("a field that must be understood", "fields", [FIELD], ["HS507"]),
        ("a rotated target", "target.basis_digest", digest("b"), ["HS301"]),
        ("another rope", "target.rope.0.theta", 5e5, ["HS301"]),
        ("another tokenizer", "tokenizer_digest", digest("b"), ["HS302"]),
        ("quantised", "target.quantization", "fp8", ["HS305"]),
        ("another width", "target.hidden_size", 16, ["HS409"]),
        ("fewer captures", "captures.0.depth", 0, ["HS507"]),
        ("states in another dtype", "captures.0.dtype", "float16", ["HS507"]),
    )
    for name, path, value, codes in others:
        start = {**base(), "layout": {"aux": ["d2"], "last": "d4"}}
        yield {"name": name, "contract": start, "other": edited(path, value, start), "codes": codes}


MASKS = {
    "one turn": [0, 0, 0, 1, 1, 1, 0],
    "two turns": [0, 0, 1, 1, 1, 0, 0, 1, 1, 0],
    "answer at both ends": [1, 1, 0, 1, 1],
    "one supervised token": [0, 0, 1, 0],
    "too short": [0, 1],
}


def align() -> Iterator[Json]:
    """Yield masks, steps and rules with the training indexes that carry loss (spec section 7, hsformat/align.py)."""
    rules: dict[str, Callable[[list[int], int, int], bool]] = {
        "serving": lambda m, t, k: all(m[i] for i in range(t + 1, t + 2 + k + 1)),
        "input": lambda m, t, k: bool(m[t + 1 + k]),
        "target": lambda m, t, k: bool(m[t + 2 + k]),
        "feature": lambda m, t, k: bool(m[t + k]),
    }
    for name, m in MASKS.items():
        for k in (0, 1, 3):
            for rule, carries in rules.items():
                indexes = [t for t in range(len(m)) if t + 2 + k < len(m) and carries(m, t, k)]
                yield {"name": f"{name}, step {k}, {rule}", "loss_mask": m, "step": k, "rule": rule, "indexes": indexes}


def captures() -> Iterator[Json]:
    """Yield keys with depth and norm; null where the text is no key."""
    for key, parsed in {
        "d0": [0, "none"], "d15": [15, "none"], "d30n": [30, "final"], "d100": [100, "none"], "d0n": [0, "final"],
        "15": None, "d": None, "d01": None, "d-1": None, "d1N": None, "D1": None, "d1n ": None, "d1\n": None,
        "d1.0": None, "d\u0661": None, "": None,
    }.items():  # fmt: skip
        yield {"name": json.dumps(key), "key": key, "depth": parsed and parsed[0], "norm": parsed and parsed[1]}


def engines() -> Iterator[Json]:
    """Yield what each engine calls a capture of a Llama of 30 layers; null: it has no number for it."""
    numbers: dict[str, dict[str, int | None]] = {
        "transformers": {"d0": 0, "d1": 1, "d15": 15, "d29": 29, "d30": None, "d30n": 30},
        "vllm": {"d0": 0, "d1": 1, "d15": 15, "d29": 29, "d30": 30, "d30n": None},
        "sglang": {"d0": None, "d1": 0, "d15": 14, "d29": 28, "d30": None, "d30n": None},
    }
    for engine, table in numbers.items():
        for key, number in table.items():
            yield {"name": f"{engine} {key}", "engine": engine, "architecture": "LlamaForCausalLM", "num_layers": 30,
                   "key": key, "number": number}  # fmt: skip


FAMILIES = (contracts, digests, records, compare, align, captures, engines)


def case_files() -> dict[Path, str]:
    """Return the text of each file by its path: one family of cases a file, a case a line."""
    out = {}
    for family in FAMILIES:
        lines = ",\n".join(f"  {json.dumps(case, ensure_ascii=True)}" for case in family())
        out[FOLDER / f"{family.__name__}.json"] = f"[\n{lines}\n]\n"
    return out


def main() -> None:
    """Write the files below the working directory."""
    for path, text in case_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
