"""hsformat: versioned, validated hidden-state records in chunked Zarr, for training EAGLE-3 draft heads.

A hidden state is not stored without its meaning and is not trained on against a different meaning. Start with
:func:`create`, :func:`open` and :func:`validate_store`; the words are in docs/spec/1.0.md.

Names are loaded when they are first used, so that ``import hsformat`` costs next to nothing and brings neither torch
nor zarr.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hsformat import align, engines, target
    from hsformat.compare import compare
    from hsformat.contract import Capture, Contract, Embedding, FieldSpec, FinalNorm, Head, Rope, TargetModel
    from hsformat.layout import EAGLE3_SHIFT, Layout, ServingLayout, Shift
    from hsformat.problems import (
        ContractMismatch,
        ForeignFileError,
        HsError,
        InvalidRecord,
        Problem,
        ResolveError,
        Severity,
        StoreError,
    )
    from hsformat.record import Generation, Provenance, Record, TokenSample
    from hsformat.source import RecordSource
    from hsformat.store import Store, Writer, append, create, open
    from hsformat.validate import validate_store

_MODULES = ("align", "engines", "target")
_NAMES = {
    "hsformat.compare": ("compare",),
    "hsformat.contract": (
        "Capture", "Contract", "Embedding", "FieldSpec", "FinalNorm", "Head", "Rope", "TargetModel",
    ),
    "hsformat.layout": ("EAGLE3_SHIFT", "Layout", "ServingLayout", "Shift"),
    "hsformat.problems": (
        "ContractMismatch", "ForeignFileError", "HsError", "InvalidRecord", "Problem", "ResolveError", "Severity",
        "StoreError",
    ),
    "hsformat.record": ("Generation", "Provenance", "Record", "TokenSample"),
    "hsformat.source": ("RecordSource",),
    "hsformat.store": ("Store", "Writer", "append", "create", "open"),
    "hsformat.validate": ("validate_store",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
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
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hsformat.{name}")
    if (home := _HOME.get(name)) is None:
        raise AttributeError(f"module 'hsformat' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps ``hsformat.compare`` the function: Python binds a submodule to its name whenever it is first imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        named_alike = name in _HOME and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if named_alike else value)


sys.modules[__name__].__class__ = _Package
