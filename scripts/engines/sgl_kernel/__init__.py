"""A stand-in for the CPU build of SGLang's package of kernels, which no index carries. Never part of hsformat.

It is installed into the environment of ``setup_sglang_cpu.sh`` alone, so that SGLang imports on a machine without a GPU
and decodes greedily with an EAGLE-3 draft of one candidate a step, in plain torch. Everything else that SGLang imports
from here exists by name and raises ``NotImplementedError`` when it is called: nothing is computed by a guess.

What the functions do is stated by their callers in SGLang 0.5.23, which have a Triton version of most of them:
``kernels/ops/speculative``, ``kernels/ops/kvcache/cache_move.py``, ``srt/mem_cache/allocation.py``,
``srt/layers/attention/intel_amx_backend.py``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

from sgl_kernel._attention import register_attention
from sgl_kernel._cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel._chain import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0.4.10"
"""The version that SGLang 0.5.23 asks for."""


class _Absent:
    """A kernel, or a group of them, that is not here."""

    def __init__(self, name: str) -> None:
        self.__name__ = self._name = name

    def __getattr__(self, name: str) -> _Absent:
        return _absent(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not in hsformat's stand-in for sgl_kernel")


def _absent(owner: str, name: str) -> _Absent:
    if name.startswith("__"):  # Python asks for these itself, and takes an answer for a promise
        raise AttributeError(f"{owner} has no {name}")
    return _Absent(f"{owner}.{name}")


class _AbsentModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, so that what lies below can be imported as well

    def __getattr__(self, name: str) -> _Absent:
        return _absent(self.__name__, name)


class _AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no file has: asked last of all."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        own = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if own else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is executed."""


def __getattr__(name: str) -> _Absent:
    return _absent(__name__, name)


sys.meta_path.append(_AbsentModules())
register_attention()
