"""For tests of what is built on hsformat: builders, Hypothesis strategies, conformance suites, JSON cases.

============== ==================================================================================
``builders``   small valid objects, stores from records, bit-exact comparison
``strategies`` any valid contract, record, sample, layout; ``broken``: records that break one rule
``extractor``  :class:`ExtractorConformance`, for engines
``store``      :class:`StoreConformance`, for places of bytes
``cases``      the conformance cases of docs/spec/cases, for other implementations
``examples``   a real example of each problem code, as ``hsformat explain`` shows it
============== ==================================================================================

Needs ``pip install 'hsformat[testing]'``. Nothing in hsformat imports it but ``python -m hsformat.spec``, which
writes the cases. docs/guides/testing.md has worked examples.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401 - only to say what is missing
    import pytest
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"hsformat.testing needs {e.name}: pip install 'hsformat[testing]'", name=e.name) from e

pytest.register_assert_rewrite(*(f"hsformat.testing.{name}" for name in ("_harness", "extractor", "store")))

from hsformat.testing.broken import BREAKS, Break, broken_records
from hsformat.testing.builders import (
    assert_same_bytes,
    assert_same_record,
    build_store,
    digest,
    tiny_contract,
    tiny_record,
    tiny_target,
)
from hsformat.testing.extractor import ExtractorConformance
from hsformat.testing.store import StoreConformance
from hsformat.testing.strategies import contracts, layouts, provenances, record_lists, records, token_samples

__all__ = [
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
]
