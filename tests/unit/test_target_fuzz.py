"""Any config and any bytes give a description or problems, never another exception."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsformat.problems import CODES, ForeignFileError
from hsformat.target import FAMILIES, describe
from hsformat.target.config import normalise, read_config

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny-llama"
PUBLISHED = json.loads((DATA / "published_configs.json").read_text())
KEYS = sorted({key for config in PUBLISHED.values() for key in config} | {"rope_parameters", "no_rope_layers"})
INNER_KEYS = ["rope_type", "rope_theta", "quant_method", "model_type", "full_attention"]
ODD = [0, 1, 1e-320, 10**400, "\ud800", "yarn", "default", "gemma3", "full_attention"]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER_KEYS), inner, max_size=3),
    max_leaves=5,
)


def codes(call) -> set[str]:
    """Return the codes of what ``call`` raises; any other exception than ours is the failure."""
    try:
        call()
    except ForeignFileError as e:
        return {p.code for p in e.problems}
    return set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(shutil.copytree(TINY, tmp_path_factory.mktemp("fuzz") / "m"))


@settings(max_examples=150)
@given(
    base=st.sampled_from(sorted(PUBLISHED)),
    family=st.none() | st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4),
)
def test_any_config(folder, base, family, changes):
    config = {**PUBLISHED[base], **({"model_type": family} if family else {}), **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert codes(lambda: describe(folder)) <= set(CODES)
    assert codes(lambda: normalise(read_config(folder), problems=[])) <= set(CODES)


@settings(max_examples=60)
@given(position=st.integers(0, 9000), value=st.binary(min_size=1, max_size=8))
def test_any_bytes_in_a_header(folder, position, value):
    shutil.copy(TINY / "config.json", folder / "config.json")
    data = bytearray((TINY / "model.safetensors").read_bytes())
    data[position : position + len(value)] = value
    (folder / "model.safetensors").write_bytes(data)
    found = codes(lambda: describe(folder))
    shutil.copy(TINY / "model.safetensors", folder / "model.safetensors")
    assert found <= {"HS602", "HS409", "HS411"}
