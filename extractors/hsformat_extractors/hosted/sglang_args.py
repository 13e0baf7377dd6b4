"""What SGLang is started with so that it gives the captures wanted: from capture keys to its arguments. Pure functions.

Three sources, none of which patches the engine (files of ``sglang/srt`` 0.5.23):

- depths below N: ``enable_return_aux_hidden_states`` with ``return_aux_hidden_state_layer_ids``; the speculative
  algorithm only names the convention of these ids, and no draft is loaded (``arg_groups/validation_hook.py``);
- depth N before the final norm: what the module of that norm returns as the residual, or was given. Through ids depth N
  ends the scheduler at the first forward pass;
- depth N after the final norm: what the logits processor is given.

They are read by one hook on those two modules (``forward_hooks``, ``model_executor/hook_manager.py``). Hooks are
registered after CUDA graphs were captured, and a graph that is replayed runs no hook
(``model_executor/model_runner_components/cuda_graph_setup.py``), so that graphs are off for every phase whose states
are wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hsformat.engines.ids import capturable, fed, ids_of
from hsformat.engines.profile import load_profile
from hsformat.engines.rows import CaptureRow, parse_depth
from hsformat.engines.table import capture_row, parse_version
from hsformat.layout import capture_key, parse_capture_key
from hsformat.problems import HsError, Problem, problem
from hsformat_extractors.hosted.options import engine_arguments as further_arguments
from hsformat_extractors.hosted.preflight import version_problems
from hsformat_extractors.hosted.wire import Launch
from hsformat_extractors.sglang import SglangExtractor

__all__ = [
    "HOOK_FACTORY", "HOOK_NAME", "Plan", "captures_of", "engine_arguments", "plan_captures", "server_flags",
    "version_found",
]  # fmt: skip

HOOK_NAME = "hsformat"
HOOK_FACTORY = "hsformat_extractors.hosted.sglang_hook:hook_factory"

_MODULES = ("logits_processor", "*.logits_processor", "model.norm", "*.model.norm", "language_model.norm",
            "*.language_model.norm")  # fmt: skip
"""Patterns of ``fnmatch`` over module names. Other norms that they find do no harm: the hook takes the one whose output
the logits processor is given."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where each capture comes from.

    Attributes
    ----------
    aux
        Keys of the captures that come by ids, in the order in which the engine gives them.
    ids
        ``return_aux_hidden_state_layer_ids``.
    before_norm, after_norm
        Key of depth N before and after the final norm, where wanted.
    """

    aux: tuple[str, ...]
    ids: tuple[int, ...]
    before_norm: str | None
    after_norm: str | None

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of all captures, ascending."""
        return (*self.aux, *(k for k in (self.before_norm, self.after_norm) if k is not None))


def version_found(version: str) -> list[Problem]:
    """Return why a version of SGLang cannot be used.

    0.5.23 is the first with ``enable_return_aux_hidden_states``; before it, aux states come with a draft alone.
    """
    known = SglangExtractor
    return [*version_problems(known.name, version, package=known.package, minimum=known.minimum, install=known.install)]


def captures_of(row: CaptureRow, num_layers: int) -> tuple[str, ...]:
    """Return the keys of all captures that a target can give one at a time, ascending."""
    low, high = row.lowest, min(parse_depth(row.deepest, num_layers), num_layers - 1)
    inner = [d for d in range(low, high + 1) if ids_of(row, [d], num_layers) is not None]
    return (*map(capture_key, inner), capture_key(num_layers), capture_key(num_layers, normed=True))


def plan_captures(version: str, launch: Launch) -> Plan:
    """Return where the captures of a target come from.

    Parameters
    ----------
    version
        Of SGLang.
    launch
        ``options``: ``engine_profile``, a file of rows that a probe wrote, for a version that the table has not.

    Raises
    ------
    HsError
        HS410: the version is none, too old, or not known for this architecture; a depth, or these depths together, that
        it does not capture. HS304: the target has no such depth. HS504, HS602, HS603: the profile cannot be read.
    """
    version = parse_version("sglang", version)
    if found := version_found(version):
        raise HsError(found)
    path = launch.options.get("engine_profile")
    row = capture_row("sglang", version, launch.architecture, None if path is None else load_profile(path),
                      since=SglangExtractor.minimum)  # fmt: skip
    n = launch.num_layers
    parsed = [(key, *parse_capture_key(key)) for key in launch.captures]
    if problems := list(_impossible(row, n, parsed)):
        raise HsError(problems)
    depths = [d for _, d, _ in parsed if d < n]
    ids = ids_of(row, depths, n) if depths else []
    if ids is None:
        raise HsError(
            problem("HS410", where="captures", got=", ".join(capture_key(d) for d in depths),
                    expected=f"depths that one list of layer ids stands for: {row.source}",
                    fix="ask for other depths together: what an id means depends on the others in its list")
        )  # fmt: skip
    return Plan(
        aux=tuple(capture_key(d) for d in fed(row, depths)),
        ids=tuple(ids),
        before_norm=next((k for k, d, normed in parsed if d == n and not normed), None),
        after_norm=next((k for k, d, normed in parsed if d == n and normed), None),
    )


def _impossible(row: CaptureRow, n: int, parsed: list[tuple[str, int, bool]]) -> Iterator[Problem]:
    high = min(parse_depth(row.deepest, n), n - 1)
    for key, depth, normed in parsed:
        if depth > n or (normed and depth != n):
            yield problem("HS304", where=f"capture {key}", got=key, expected=f"depths 0 to {n}, the norm at {n} alone")
        elif depth < n and not (depth <= high and capturable(row, depth, n)):
            yield problem("HS410", where=f"capture {key}", got=f"depth {depth}",
                          expected=f"depths {row.lowest} to {high} by layer ids, and {n}",
                          fix="leave it out, or extract it with another engine")  # fmt: skip


def engine_arguments(launch: Launch, plan: Plan, *, staging: str, cpu: bool) -> dict[str, Any]:
    """Return the keyword arguments of ``sglang.Engine``, which are those of ``launch_server`` too.

    Parameters
    ----------
    launch
        ``options``: ``tensor_parallel``, ``data_parallel`` (numbers), ``engine_args`` (a JSON object of further
        arguments, which win over those that are given here), all of them checked by ``preflight``.
    staging
        The folder that the hook writes to; on every machine that runs a scheduler.
    cpu
        There is no accelerator.
    """
    limit = launch.batch_tokens
    aux: dict[str, Any] = {}
    if plan.ids:
        aux = {
            "enable_return_aux_hidden_states": True,
            "speculative_algorithm": "EAGLE3",
            "return_aux_hidden_state_layer_ids": list(plan.ids),
        }
    hook = {
        "name": HOOK_NAME,
        "target_modules": list(_MODULES),
        "hook_factory": HOOK_FACTORY,
        "config": {
            "staging": staging,
            "aux": list(plan.aux),
            "before_norm": plan.before_norm,
            "after_norm": plan.after_norm,
            "hidden_size": launch.hidden_size,
        },
    }
    return {
        "model_path": launch.model,
        "dtype": launch.dtype,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        # In 0.5.23 "--chunked-prefill-size must be divisible by page_size" (arg_groups/validation_hook.py), at most 64.
        "chunked_prefill_size": limit - limit % 64 if limit >= 64 else limit,
        "max_prefill_tokens": limit,
        "disable_prefill_cuda_graph": True,
        "disable_decode_cuda_graph": True,
        "disable_overlap_schedule": True,
        "random_seed": int(launch.sampling.get("seed") or 0),
        "forward_hooks": [hook],
        **aux,
        # With it the seed of a request is heeded; it needs kernels of a GPU (batch_invariant_ops).
        **({"enable_deterministic_inference": True} if launch.sampling and not cpu else {}),
        **(_for_a_cpu(launch) if cpu else {}),
        **_parallel(launch.options),
        **further_arguments(launch.options),
    }


def _for_a_cpu(launch: Launch) -> dict[str, Any]:
    """Return what runs without an accelerator and without Intel AMX."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.3,
        "max_total_tokens": max(_CPU_TOKENS, 4 * launch.batch_tokens),
        "max_running_requests": 32,
    }


_CPU_TOKENS = 16384
"""Of the cache of keys and values without an accelerator, where SGLang would take what memory there is."""


def _parallel(options: Mapping[str, str]) -> dict[str, int]:
    names = {"tensor_parallel": "tp_size", "data_parallel": "dp_size"}
    return {argument: int(options[name]) for name, argument in names.items() if name in options}


def server_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of ``python -m sglang.launch_server`` that stand for these arguments.

    A list is a word for each entry; an object, or a list that holds one, is JSON.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value)):
            words += [flag, json.dumps(value)]
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not False and value is not None:
            words += [flag, str(value)]
    return words
