"""The public names are pinned, and importing the package brings nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hsformat

PUBLIC = {
    "EAGLE3_SHIFT",
    "Capture",
    "Contract",
    "ContractMismatch",
    "Embedding",
    "FieldSpec",
    "FinalNorm",
    "ForeignFileError",
    "Generation",
    "Head",
    "HsError",
    "InvalidRecord",
    "Layout",
    "Problem",
    "Provenance",
    "Record",
    "ResolveError",
    "Rope",
    "Severity",
    "Shift",
    "Store",
    "StoreError",
    "TargetModel",
    "TokenSample",
    "Writer",
    "__version__",
    "align",
    "append",
    "compare",
    "create",
    "engines",
    "open",
    "target",
    "validate_store",
}
HEAVY = {"torch", "zarr", "transformers", "vllm", "sglang", "numcodecs"}


def test_public_names_are_pinned():
    assert set(hsformat.__all__) == PUBLIC
    assert set(dir(hsformat)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_loads(name):
    assert getattr(hsformat, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hsformat.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import hsformat", HEAVY | {"pydantic", "numpy"}),
        ("import hsformat; hsformat.Contract; hsformat.Record; hsformat.compare; hsformat.Layout", HEAVY),
        ("import hsformat; hsformat.engines; hsformat.target", HEAVY),
        ("import hsformat; hsformat.open; hsformat.validate_store", {"torch", "transformers"}),
        ("import hsformat.prepare", {"torch", "transformers", "pyarrow", "zarr"}),
        ("import hsformat_extractors.transformers", {"torch", "transformers"}),
        ("import hsformat.cli", {"torch", "transformers"}),
    ],
)
def test_import_brings_nothing_heavy(code, absent):
    script = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) & absent == set()
