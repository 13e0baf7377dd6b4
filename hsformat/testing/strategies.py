"""Hypothesis strategies: whatever docs/spec/1.0.md allows, valid by construction.

Arrays are filled from a drawn seed with arbitrary bit patterns (signed zeros, subnormal numbers, NaN payloads in
fields), so that their lengths shrink and their numbers cost nothing. May import the core's models alone.

>>> from hypothesis import given
>>> @given(contracts().flatmap(records))
... def test(record):
...     assert record.num_states in (record.num_tokens, record.num_tokens - 1)
>>> test()
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from hsformat.contract import SPEC_VERSION, Capture, Contract, FieldDtype, FieldSpec, StateDtype, TargetModel
from hsformat.dtypes import numpy_dtype, to_float32
from hsformat.layout import Layout
from hsformat.record import Generation, Provenance, Record, TokenSample

__all__ = ["contracts", "ids", "layouts", "provenances", "record_lists", "records", "target_models", "token_samples"]

TEXT = st.characters(exclude_categories=["Cs"])  # UTF-8 has no lone surrogates
SCALES = st.floats(2**-20, 2**20)
DIGESTS = st.binary(min_size=32, max_size=32).map(lambda b: f"sha256:{b.hex()}")
STATE_DTYPES = st.sampled_from(get_args(StateDtype))
ROPE_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("default", {}),
    ("linear", {"factor": 2.0}),
    ("dynamic", {"factor": 4, "original_max_position_embeddings": 2048}),
    ("yarn", {"factor": 4.0, "attention_factor": None, "truncate": False}),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("proportional", {"head_dim": 16}),
    ("longrope", {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.25], "note": "phi"}),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 2**53, 2**53 - 1) | st.floats(-1e9, 1e9) | st.text(TEXT, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TEXT, max_size=8), inner, max_size=3),
    max_leaves=5,
)
"""What a template's keyword argument may be: numbers that JSON keeps, text that UTF-8 holds."""


def ids() -> st.SearchStrategy[str]:
    """Draw record ids: 1 to 1,024 bytes of UTF-8, seldom ASCII alone, seldom of the full length."""
    long = st.integers(900, 1024).map(lambda n: "é" * (n // 2) + "x" * (n % 2))
    return st.one_of(st.text(TEXT, min_size=1, max_size=20), long)


@st.composite
def target_models(draw: st.DrawFn, *, max_layers: int = 6, max_hidden: int = 9) -> TargetModel:
    """Draw targets: small sizes, every kind of norm, head, embedding, RoPE and quantization."""
    vocab = draw(st.integers(1, 300))
    kinds = draw(st.lists(st.sampled_from(ROPE_KINDS), max_size=2))
    layers = ("all",) if len(kinds) == 1 else ("sliding_attention", "full_attention")
    return TargetModel.model_validate(
        {
            "name": draw(st.text(TEXT, min_size=1, max_size=12)),
            "revision": draw(st.none() | st.text(TEXT, max_size=12)),
            "architecture": draw(st.sampled_from(("LlamaForCausalLM", "Gemma3ForCausalLM", "NewForCausalLM"))),
            "num_layers": draw(st.integers(1, max_layers)),
            "hidden_size": draw(st.integers(1, max_hidden)),
            "vocab_size": vocab,
            "dtype": draw(STATE_DTYPES),
            "quantization": draw(st.none() | st.sampled_from(("fp8", "gptq", "compressed-tensors"))),
            "embedding": {"scale": draw(SCALES), "tied": draw(st.booleans())},
            "head": {
                "bias": draw(st.booleans()),
                "softcap": draw(st.none() | SCALES),
                "scale": draw(SCALES),
                "padded_vocab": vocab + draw(st.integers(0, 64)),
            },
            "final_norm": {
                "kind": draw(st.sampled_from(("rmsnorm", "layernorm"))),
                "eps": draw(st.sampled_from((1e-5, 1e-6, 1e-12))),
                "unit_offset": draw(st.booleans()),
            },
            "rope": [
                {
                    "applies_to": layer,
                    "kind": kind,
                    "theta": draw(st.sampled_from((1e4, 5e5, 1e6))),
                    "rotary_dim": draw(st.integers(1, 128)),
                    "parameters": parameters,
                }
                for layer, (kind, parameters) in zip(layers, kinds, strict=False)
            ],
            "config_digest": draw(DIGESTS),
            "basis_digest": draw(DIGESTS),
            "weights_digest": draw(st.none() | DIGESTS),
        }
    )


@st.composite
def field_specs(draw: st.DrawFn, *, max_fields: int = 3) -> tuple[FieldSpec, ...]:
    """Draw declared fields: both axes, every dtype, scalars and shapes."""
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), unique=True, max_size=max_fields))
    return tuple(
        FieldSpec(
            name=name,
            axis=draw(st.sampled_from(("token", "record"))),
            dtype=draw(st.sampled_from(get_args(FieldDtype))),
            shape=tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
            must_understand=draw(st.booleans()),
        )
        for name in names
    )


@st.composite
def contracts(draw: st.DrawFn, *, max_layers: int = 6, max_hidden: int = 9) -> Contract:
    """Draw contracts: any captures (depths 0 and N, both norms, every dtype), fields, codec and layout of them."""
    target = draw(target_models(max_layers=max_layers, max_hidden=max_hidden))
    n = target.num_layers
    possible = [*((d, False) for d in range(n + 1)), (n, True)]
    chosen = sorted(draw(st.sets(st.sampled_from(possible), min_size=1, max_size=5)))
    captures = tuple(
        Capture(depth=d, norm="final" if normed else "none", dtype=draw(STATE_DTYPES)) for d, normed in chosen
    )
    return Contract(
        spec_version=SPEC_VERSION,
        target=target,
        tokenizer_digest=draw(DIGESTS),
        captures=captures,
        positions="1d",
        codec=draw(st.sampled_from(("compact", "fast"))),
        fields=draw(field_specs()),
        layout=draw(_layouts([c.key for c in captures], [c.key for c in captures if c.depth == n])),
    )


def layouts(contract: Contract) -> st.SearchStrategy[Layout]:
    """Draw layouts that a contract's captures can serve: aux in any order, ``last`` of depth N or none."""
    deepest = [c.key for c in contract.captures if c.depth == contract.target.num_layers]
    return _layouts(list(contract.keys), deepest)


def _layouts(keys: list[str], deepest: list[str]) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        aux=st.lists(st.sampled_from(keys), min_size=1, unique=True).map(tuple),
        last=st.sampled_from([None, *deepest]),
    )


@st.composite
def provenances(draw: st.DrawFn, *, generated: bool | None = None) -> Provenance:
    """Draw provenances; ``generated`` says whether the target wrote the supervised tokens (None: either)."""
    modes = {None: ("none", "greedy", "sampled"), False: ("none",), True: ("greedy", "sampled")}[generated]
    mode = draw(st.sampled_from(modes))
    data: dict[str, Any] = {"mode": mode}
    if mode != "none":
        data["max_new_tokens"] = draw(st.integers(1, 2**31))
    if mode == "sampled":
        data |= {
            "temperature": draw(SCALES),
            "top_p": draw(st.none() | st.floats(2**-10, 1)),
            "top_k": draw(st.none() | st.integers(1, 100)),
            "seed": draw(st.integers(0, 2**53 - 1)),
        }
    return Provenance(
        generation=Generation.model_validate(data),
        template_digest=draw(st.none() | DIGESTS),
        template_kwargs=draw(st.dictionaries(st.text(TEXT, min_size=1, max_size=8), JSON, max_size=2)),
    )


@st.composite
def records(
    draw: st.DrawFn, contract: Contract, *, id: st.SearchStrategy[str] | None = None, max_tokens: int = 30
) -> Record:
    """Draw valid records of a contract: given (T states) and generated (T or T-1), with and without positions.

    Parameters
    ----------
    id
        Where ids come from; None: :func:`ids`.
    max_tokens
        Upper bound of T.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    t = draw(st.integers(1, max_tokens))
    provenance = draw(provenances())
    s = t - 1 if t > 1 and provenance.generation.mode != "none" and draw(st.booleans()) else t
    mask = rng.integers(0, 2, t).astype(np.uint8)
    mask[draw(st.integers(0, t - 1))] = 1
    return Record(
        id=draw(ids() if id is None else id),
        input_ids=rng.integers(0, contract.target.vocab_size, t).astype(np.int32),
        loss_mask=mask,
        hidden={c.key: _states(rng, (s, contract.target.hidden_size), c.dtype) for c in contract.captures},
        position_ids=np.sort(rng.integers(0, 2**40, t)) if draw(st.booleans()) else None,
        fields={
            f.name: _any_bits(rng, (t, *f.shape) if f.axis == "token" else f.shape, numpy_dtype(f.dtype))
            for f in contract.fields
        },
        provenance=provenance,
        source_digest=draw(st.none() | DIGESTS),
    )


@st.composite
def record_lists(
    draw: st.DrawFn, contract: Contract, *, min_size: int = 0, max_size: int = 5, max_tokens: int = 30
) -> list[Record]:
    """Draw lists of valid records with different ids, to be written by :func:`hsformat.testing.build_store`."""
    names = draw(st.lists(ids(), unique=True, min_size=min_size, max_size=max_size))
    return [draw(records(contract, id=st.just(name), max_tokens=max_tokens)) for name in names]


@st.composite
def token_samples(draw: st.DrawFn, *, vocab_size: int = 100, max_tokens: int = 30, prompt: bool = False) -> TokenSample:
    """Draw what preparation hands to an extractor; with ``prompt`` nothing is supervised, since the target answers."""
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_tokens))
    mask = np.zeros(len(tokens), np.uint8)
    if not prompt:
        mask[draw(st.integers(0, len(tokens) - 1)) :] = 1
    return TokenSample(
        id=draw(ids()),
        input_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        provenance=draw(provenances(generated=False)),
    )


def _any_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return any bit patterns of a type."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _states(rng: np.random.Generator, shape: tuple[int, int], name: str) -> npt.NDArray[Any]:
    """Return finite bit patterns without a row of zeros."""
    array = _any_bits(rng, shape, numpy_dtype(name)).copy()
    array[~np.isfinite(to_float32(array))] = 1
    array[(array == 0).all(axis=1)] = 1
    return array
