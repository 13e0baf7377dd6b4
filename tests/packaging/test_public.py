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
    "RecordSource",
    "ResolveError",
    "Rope",
    "ServingLayout",
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


@pytest.mark.parametrize("before", ["hsformat.open", "hsformat.compare", "import hsformat.compare"])
def test_compare_is_the_function_whatever_was_imported_before(before):
    code = f"import hsformat; {before}; from hsformat.compare import compare; assert hsformat.compare is compare"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hsformat.nothing  # noqa: B018 - the look is what raises


TESTING = {
    "BREAKS",
    "Break",
    "ExtractorConformance",
    "StoreConformance",
    "assert_same_bytes",
    "assert_same_record",
    "broken_records",
    "build_store",
    "contracts",
    "digest",
    "layouts",
    "provenances",
    "record_lists",
    "records",
    "tiny_contract",
    "tiny_record",
    "tiny_target",
    "token_samples",
}


def test_names_of_testing_are_pinned():
    import hsformat.testing

    assert set(hsformat.testing.__all__) == TESTING
    assert all(getattr(hsformat.testing, name) is not None for name in TESTING)


@pytest.mark.parametrize("missing", ["hypothesis", "pytest"])
def test_testing_without_its_extra_names_the_command(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import hsformat.testing"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode
    assert f"hsformat.testing needs {missing}: pip install 'hsformat[testing]'" in run.stderr


def test_torch_without_its_extra_names_the_command():
    code = "import sys; sys.modules['torch'] = None; import hsformat.torch"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode
    assert "hsformat.torch needs torch: pip install 'hsformat[train]'" in run.stderr


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import hsformat", HEAVY | {"pydantic", "numpy"}),
        ("import hsformat; hsformat.Contract; hsformat.Record; hsformat.compare; hsformat.Layout", HEAVY),
        ("import hsformat; hsformat.engines; hsformat.target; hsformat.RecordSource", HEAVY),
        ("import hsformat; hsformat.open; hsformat.validate_store", {"torch", "transformers"}),
        ("import hsformat.prepare", {"torch", "transformers", "pyarrow", "zarr"}),
        ("import hsformat_extractors.transformers", {"torch", "transformers"}),
        ("import hsformat.cli", HEAVY | {"pydantic", "numpy", "typer"}),
        ("import hsformat.cli.commands", {"torch", "transformers", "hypothesis", "pytest"}),
        (
            "import hsformat.validate, hsformat.extraction, hsformat.prepare",
            {"hypothesis", "pytest", "hsformat.testing"},
        ),
        ("import hsformat.testing", {"torch", "transformers"}),
    ],
)
def test_import_brings_nothing_heavy(code, absent):
    script = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) & absent == set()
