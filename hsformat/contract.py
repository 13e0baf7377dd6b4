"""The contract: what a store promises of all its records.

Frozen models without defaults: a field that decides meaning is given, or the contract is refused. The words are
those of docs/spec/1.0.md (section 2), which cites these classes; the JSON schema in docs/spec is generated from
them (``hsformat.spec.v1_0``). This module may import ``problems``, ``digests``,
``models``, ``rotary`` and ``layout``.

Examples
--------
>>> Capture(depth=15, norm="none", dtype="bfloat16").key
'd15'
>>> Capture(depth=30, norm="final", dtype="bfloat16").key
'd30n'
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from hsformat.digests import Digest, canonical_json, digest_json
from hsformat.layout import AuxInput, Layout
from hsformat.models import FromList, Frozen
from hsformat.problems import Problem, StoreError, problem
from hsformat.rotary import Rope

__all__ = [
    "SPEC_VERSION",
    "Capture",
    "Contract",
    "Digest",
    "Embedding",
    "FieldSpec",
    "FinalNorm",
    "Head",
    "Rope",
    "StateDtype",
    "TargetModel",
    "differing_fields",
    "parse_contract",
]

SPEC_VERSION: Final = "1.0"

StateDtype = Literal["bfloat16", "float16", "float32"]
FieldDtype = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64"]


class Capture(AuxInput):
    """One stored hidden state.

    Attributes
    ----------
    depth
        The residual stream after this many decoder layers; 0 is the embedding output as the first layer
        receives it, N is after the last layer.
    norm
        ``none``: as it is in the residual stream. ``final``: after the target's final norm (depth N alone).
    dtype
        The element type on disk.
    """

    dtype: StateDtype


class Embedding(Frozen):
    """The target's input embedding.

    Depth 0 is ``scale * row``, plus the position embedding of a target that adds a learned one (GPT-2). ``tied``: the
    head uses the same matrix.
    """

    scale: Annotated[float, Field(gt=0)]
    tied: bool


class Head(Frozen):
    """The target's lm_head: ``logits = cap(scale * (h @ W.T + b))``.

    Attributes
    ----------
    bias
        Whether there is a bias ``b``.
    softcap
        ``cap(x) = softcap * tanh(x / softcap)``; None: no cap.
    scale
        Factor on the logits before the cap.
    padded_vocab
        Rows of ``W``; at least the vocabulary size.
    """

    bias: bool
    softcap: Annotated[float, Field(gt=0)] | None
    scale: Annotated[float, Field(gt=0)]
    padded_vocab: Annotated[int, Field(gt=0)]


class FinalNorm(Frozen):
    """The norm between depth N and the head; ``unit_offset`` when the weight is stored minus one (Gemma)."""

    kind: Literal["rmsnorm", "layernorm"]
    eps: Annotated[float, Field(gt=0)]
    unit_offset: bool


class TargetModel(Frozen):
    """The large model whose states are stored.

    Attributes
    ----------
    name, revision
        For people; not compared.
    architecture
        First entry of ``architectures`` in the model's config.
    num_layers
        N, the number of decoder layers.
    dtype
        The dtype in which the target ran when the states were taken.
    quantization
        Method name of the target's weights (``fp8``, ``gptq``, ...); None: not quantised.
    rope
        One entry a set of layers; empty: the config states no rotary embedding.
    config_digest
        Over the normalised config (spec section 3).
    basis_digest
        Over embedding, final norm and lm_head: tells a rotated target from the original.
    weights_digest
        Over all weight files; None: not computed.
    """

    name: Annotated[str, Field(min_length=1)]
    revision: str | None
    architecture: Annotated[str, Field(min_length=1)]
    num_layers: Annotated[int, Field(gt=0)]
    hidden_size: Annotated[int, Field(gt=0)]
    vocab_size: Annotated[int, Field(gt=0)]
    dtype: StateDtype
    quantization: str | None
    embedding: Embedding
    head: Head
    final_norm: FinalNorm
    rope: Annotated[tuple[Rope, ...], FromList]
    config_digest: Digest
    basis_digest: Digest
    weights_digest: Digest | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head.padded_vocab < self.vocab_size:
            raise ValueError(f"head.padded_vocab {self.head.padded_vocab} is below vocab_size {self.vocab_size}")
        layers = [r.applies_to for r in self.rope]
        if len(set(layers)) != len(layers):
            raise ValueError(f"rope applies twice to the same layers: {layers}")
        return self


class FieldSpec(Frozen):
    """An extra array of each record.

    Attributes
    ----------
    name
        Letters, digits and underscores, starting with a letter.
    axis
        ``token``: [T, *shape] a record. ``record``: [*shape] a record.
    dtype
        Element type on disk.
    shape
        Trailing dimensions; empty, or left out: one number a token or a record.
    must_understand
        A reader that does not know the field refuses the store.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    axis: Literal["token", "record"]
    dtype: FieldDtype
    shape: Annotated[tuple[Annotated[int, Field(gt=0)], ...], FromList, Field(max_length=30)] = ()
    must_understand: bool


class Contract(Frozen):
    """What a store promises of all its records (docs/spec/1.0.md, section 2).

    Attributes
    ----------
    captures
        Ascending by depth, then ``none`` before ``final``; no key twice.
    positions
        ``1d``: one position a token.
    codec
        ``compact`` or ``fast``: how chunks are encoded; both are lossless.
    fields
        Extra arrays.
    layout
        The layout extracted for: the trainer's default. Its captures are all stored, and its ``last``, if any,
        is of depth N.
    """

    spec_version: Literal["1.0"]
    target: TargetModel
    tokenizer_digest: Digest
    captures: Annotated[tuple[Capture, ...], Field(min_length=1), FromList]
    positions: Literal["1d"]
    codec: Literal["compact", "fast"]
    fields: Annotated[tuple[FieldSpec, ...], FromList]
    layout: Layout

    @field_validator("captures")
    @classmethod
    def _ordered(cls, captures: tuple[Capture, ...]) -> tuple[Capture, ...]:
        order = [(c.depth, c.norm == "final") for c in captures]
        if any(b <= a for a, b in pairwise(order)):
            raise ValueError(f"captures are not ascending and unique: {[c.key for c in captures]}")
        return captures

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n, keys = self.target.num_layers, self.keys
        for c in self.captures:
            if c.depth > n:
                raise ValueError(f"capture {c.key} is deeper than the target's {n} layers")
            if c.norm == "final" and c.depth != n:
                raise ValueError(f"capture {c.key}: norm 'final' exists at depth {n} alone")
        if unknown := [k for k in self.layout.keys if k not in keys]:
            raise ValueError(f"layout names captures that are not stored: {unknown}; stored: {list(keys)}")
        last = self.layout.last
        if last is not None and self.capture(last).depth != n:
            raise ValueError(f"layout.last is {last}; a last capture has depth {n}")
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"field names are not unique: {names}")
        canonical_json(self.to_json())  # ValueError: a number that JSON readers do not keep
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the captures, ascending."""
        return tuple(c.key for c in self.captures)

    def capture(self, key: str) -> Capture:
        """Return the capture of this key.

        Raises
        ------
        KeyError
            The contract has no such capture.
        """
        for c in self.captures:
            if c.key == key:
                return c
        raise KeyError(key)

    def to_json(self) -> dict[str, Any]:
        """Return the contract as JSON-able data, as it is stored."""
        data: dict[str, Any] = self.model_dump(mode="json")
        return data

    @property
    def digest(self) -> str:
        """Digest of the whole contract."""
        return digest_json(self.to_json())

    @property
    def compatibility_digest(self) -> str:
        """Digest of what decides meaning: two stores with the same one may be trained on together.

        Left out: the target's name and revision, the layout, the codec, and fields that need not be understood.
        """
        return digest_json(compatibility_view(self.to_json()))


def compatibility_view(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a contract's JSON that the compatibility digest covers (spec rule X-2)."""
    view = {k: v for k, v in contract.items() if k not in ("layout", "codec")}
    view["target"] = {k: v for k, v in contract["target"].items() if k not in ("name", "revision")}
    view["target"]["rope"] = sorted(contract["target"]["rope"], key=lambda r: str(r["applies_to"]))
    view["fields"] = sorted((f for f in contract["fields"] if f["must_understand"]), key=lambda f: str(f["name"]))
    return view


def differing_fields(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(path, a's value, b's value)`` for each leaf in which two JSON values differ.

    Lists of different length are one difference; a missing key is shown as ``<absent>``.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted(set(a) | set(b)):
            yield from differing_fields(
                a.get(key, "<absent>"), b.get(key, "<absent>"), f"{path}.{key}" if path else key
            )
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differing_fields(x, y, f"{path}[{i}]")
    elif a != b or type(a) is not type(b):
        yield path, a, b


def parse_contract(data: Any, *, where: str) -> Contract:
    """Build a contract from JSON data.

    Raises
    ------
    StoreError
        HS502, one problem a field that is unknown, missing or wrong, with its name. An unknown
        ``spec_version`` is reported alone, since the other fields then mean what that version says.
    """
    version = data.get("spec_version") if isinstance(data, Mapping) else None
    if isinstance(version, str) and version != SPEC_VERSION:
        raise StoreError(_wrong_version(version, where))
    try:
        return Contract.model_validate_json(json.dumps(data))
    except ValidationError as e:
        raise StoreError(contract_problems(e, where=where)) from e


def contract_problems(error: ValidationError, *, where: str) -> list[Problem]:
    """Turn pydantic's findings about a contract into problems, one a field."""
    out = []
    for err in error.errors(include_url=False):
        name = ".".join(str(p) for p in err["loc"]) or "contract"
        got, expected, fix = repr(err["input"]), err["msg"], f"set {name} as docs/spec/1.0.md says"
        if err["type"] == "missing":
            got, expected = f"no field {name!r}", f"the field {name!r}"
            fix = f"give {name!r}; no field of a contract has a default"
        elif err["type"] == "extra_forbidden":
            got, expected = f"unknown field {name!r}", f"only the fields of spec {SPEC_VERSION}"
            fix = f"remove {name!r}, or read the store with a version of hsformat that knows it"
        elif err["type"] == "value_error":
            got, expected = str(err["ctx"]["error"]), "a contract that does not contradict itself"
        out.append(problem("HS502", where=f"{where}: {name}", got=_short(got), expected=expected, fix=fix))
    return out


def _wrong_version(version: str, where: str) -> Problem:
    return problem(
        "HS502",
        where=f"{where}: spec_version",
        got=version,
        expected=SPEC_VERSION,
        fix=f"install a version of hsformat that reads spec {version}",
    )


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
