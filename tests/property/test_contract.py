"""Change one field of a contract, any field: compare finds it and names it; the digests say the same."""

from __future__ import annotations

import copy
import json

import pytest
from factories import digest, tiny_contract
from hypothesis import given
from hypothesis import strategies as st

from hsformat.compare import compare
from hsformat.contract import Contract, parse_contract
from hsformat.problems import Severity, StoreError

RICH = tiny_contract(
    fields=[
        {"name": "logprob", "axis": "token", "dtype": "float32", "shape": [2], "must_understand": True},
        {"name": "note", "axis": "token", "dtype": "int8", "shape": [], "must_understand": False},
    ]
).to_json()

OTHER = {  # another valid value, for leaves where the type alone does not give one
    "revision": "main",
    "quantization": "fp8",
    "softcap": 30.0,
    "weights_digest": digest("7"),
    "norm": None,
    "dtype": "float16",
    "codec": "fast",
    "kind": "layernorm",
    "axis": "record",
    "last": None,
    "spec_version": None,
    "positions": None,
    "parameters": {"factor": 2.0},
}
HARMLESS = ("target.name", "target.revision", "codec", "layout", "fields[1]")


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i))
    else:
        yield path


def changed(path, draw):
    data = copy.deepcopy(RICH)
    *front, name = path
    at = data
    for key in front:
        at = at[key]
    old = at[name]
    if name in OTHER:
        at[name] = OTHER[name]
    elif isinstance(old, bool):
        at[name] = not old
    elif isinstance(old, int | float):
        at[name] = old + draw(st.integers(1, 50))
    elif isinstance(old, list):
        at[name] = [3]
    elif str(old).startswith("sha256:"):
        at[name] = digest("e")
    else:
        at[name] = f"{old}x"
    return data


def dotted(path):
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


@given(st.data())
def test_every_changed_field_is_found(data):
    path = data.draw(st.sampled_from(list(leaves(RICH))))
    new = changed(path, data.draw)
    try:
        other = parse_contract(new, where="test")
    except StoreError as e:
        refused = {p.code for p in e.problems}
    else:
        refused = set()
    if refused:  # the change made it invalid
        assert refused == {"HS502"}
        return
    original = parse_contract(RICH, where="test")
    problems = compare(original, other)
    assert any(p.where.startswith(dotted(path)) or dotted(path).startswith(p.where) for p in problems)
    binds = not dotted(path).startswith(HARMLESS) or dotted(path) == "fields[1].must_understand"
    assert (original.compatibility_digest != other.compatibility_digest) == binds
    assert any(p.severity is Severity.ERROR for p in problems) == binds
    assert original.digest != other.digest


@given(st.data())
def test_every_missing_or_unknown_field_is_refused_by_name(data):
    objects = [(), ("target",), ("target", "head"), ("captures", 0), ("layout",), ("fields", 1), ("target", "rope", 0)]
    path = data.draw(st.sampled_from(objects))
    new = copy.deepcopy(RICH)
    at = new
    for key in path:
        at = at[key]
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(set(at) - {"shape"})))  # the one member that may be left out
        del at[name]
    else:
        name = "surprise"
        at[name] = 1
    with pytest.raises(StoreError) as e:
        parse_contract(new, where="test")
    assert {p.code for p in e.value.problems} == {"HS502"}
    assert name in str(e.value)


def test_round_trip_and_frozen():
    original = Contract.model_validate(RICH)
    again = parse_contract(json.loads(json.dumps(original.to_json())), where="test")
    assert again == original
    assert again.digest == original.digest
    with pytest.raises(ValueError, match="frozen"):
        original.codec = "fast"


def test_future_version_is_refused_alone():
    with pytest.raises(StoreError) as e:
        parse_contract({"spec_version": "9.0", "anything": 1}, where="test")
    (p,) = e.value.problems
    assert (p.code, p.got, p.expected) == ("HS502", "9.0", "1.0")


@pytest.mark.parametrize(
    "change",
    [
        {"captures": [{"depth": 5, "norm": "none", "dtype": "bfloat16"}]},
        {"captures": [{"depth": 2, "norm": "final", "dtype": "bfloat16"}]},
        {"captures": []},
        {"captures": [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (3, 1, 2, 4)]},
        {"captures": [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (1, 1, 2, 3, 4)]},
        {"layout": {"aux": ["d0", "d2", "d3"], "last": "d4"}},
        {"layout": {"aux": ["d1", "d1"], "last": "d4"}},
        {"layout": {"aux": [], "last": "d4"}},
        {"layout": {"aux": ["d1"], "last": "d3"}},
        {"layout": {"aux": ["1"], "last": "d4"}},
        {"fields": [RICH["fields"][1], RICH["fields"][1]]},
        {"target": {**RICH["target"], "final_norm": {"kind": "unknown", "eps": 1e-5, "unit_offset": False}}},
        {"target": {**RICH["target"], "head": {**RICH["target"]["head"], "padded_vocab": 50}}},
        {"tokenizer_digest": "md5:1"},
        {"codec": "zip"},
    ],
)
def test_contradictions_are_refused(change):
    with pytest.raises(StoreError) as e:
        parse_contract({**RICH, **change}, where="test")
    assert {p.code for p in e.value.problems} == {"HS502"}


@pytest.mark.parametrize("data", [None, [], "text", 3, {}])
def test_no_contract_at_all(data):
    with pytest.raises(StoreError) as e:
        parse_contract(data, where="test")
    assert {p.code for p in e.value.problems} == {"HS502"}
