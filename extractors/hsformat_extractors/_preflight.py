"""What can be refused before any weight is loaded; torch and Transformers are imported only if they are there."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from hsformat.extraction.protocol import ExtractionRequest
from hsformat.problems import Problem, problem

__all__ = [
    "OPTIONS", "batch_problems", "capture_problems", "generation_problems", "preflight", "preflight_model",
]  # fmt: skip

OPTIONS = ("device", "attention")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def preflight(request: ExtractionRequest) -> list[Problem]:
    """Return all problems of a request that need no weights."""
    of_model = preflight_model(request.model, request.options)
    return [*of_model, *batch_problems(request), *capture_problems(request), *generation_problems(request)]


def preflight_model(model: Path, options: Mapping[str, str]) -> list[Problem]:
    """Return all reasons why a target cannot be loaded with these options, as far as they show without its weights."""
    out = [*_options(options)]
    missing = [p for p in ("torch", "transformers") if importlib.util.find_spec(p) is None]
    if missing:
        out.append(
            problem(
                "HS410", where="extractor transformers", got=f"not installed: {', '.join(missing)}",
                expected="torch and transformers", fix="pip install 'hsformat[transformers]'",
            )
        )  # fmt: skip
        return out
    return [*out, *_device(options), *_architecture(model)]


def _options(options: Mapping[str, str]) -> Iterator[Problem]:
    for name in sorted(set(options) - set(OPTIONS)):
        yield problem("HS410", where=f"option {name}", got=f"{name}={options[name]}",
                      expected=f"options of the extractor transformers: {', '.join(OPTIONS)}",
                      fix="remove it")  # fmt: skip
    device = options.get("device", "auto")
    if not _DEVICE.fullmatch(device):
        yield problem("HS410", where="option device", got=device, expected="auto, cpu, cuda or cuda:N",
                      fix="give one of these")  # fmt: skip


def batch_problems(request: ExtractionRequest) -> Iterator[Problem]:
    """Refuse a bound of tokens below 1."""
    if request.batch_tokens < 1:
        yield problem("HS410", where="batch_tokens", got=request.batch_tokens, expected="at least 1",
                      fix="give a number of tokens that fits the device, such as 4096")  # fmt: skip


def capture_problems(request: ExtractionRequest) -> Iterator[Problem]:
    """Refuse captures that no target of so many layers has."""
    n = request.target.num_layers
    for capture in request.captures:
        if capture.depth > n:
            yield problem("HS304", where=f"capture {capture.key}", got=f"depth {capture.depth}",
                          expected=f"0 to {n}: the target has {n} layers")  # fmt: skip
        elif capture.norm == "final" and capture.depth != n:
            yield problem("HS304", where=f"capture {capture.key}", got=f"norm 'final' at depth {capture.depth}",
                          expected=f"norm 'final' at depth {n} alone",
                          fix=f"ask for d{n}n, or for d{capture.depth}")  # fmt: skip


def generation_problems(request: ExtractionRequest) -> Iterator[Problem]:
    """Refuse a generation that is not fully stated, or states what its mode does not use."""
    g = request.generation
    sampling = {k: v for k in ("temperature", "top_p", "top_k", "seed") if (v := getattr(g, k)) is not None}
    if g.mode != "none" and g.max_new_tokens is None:
        yield problem("HS410", where="generation: max_new_tokens", got="none", expected="a number of tokens",
                      fix="give the longest answer that is wanted: --generate N")  # fmt: skip
    if g.mode != "sampled" and sampling:
        yield problem("HS410", where=f"generation: {', '.join(sampling)}", got=f"given with mode {g.mode}",
                      expected="mode sampled", fix="leave it out, or sample")  # fmt: skip
    if g.mode == "sampled" and (g.seed is None or g.temperature is None):
        yield problem("HS410", where="generation: seed, temperature", got=f"seed {g.seed}, temperature {g.temperature}",
                      expected="both, so that the answers can be had again", fix="give both")  # fmt: skip


def _device(options: Mapping[str, str]) -> Iterator[Problem]:
    import torch

    device = options.get("device", "auto")
    if not device.startswith("cuda") or not _DEVICE.fullmatch(device):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= count:
        yield problem("HS410", where="option device", got=device,
                      expected=f"a device that is here: {count} CUDA device(s)",
                      fix="use device=cpu or device=auto")  # fmt: skip


def _architecture(model: Path) -> Iterator[Problem]:
    """Refuse a folder that Transformers can serve only by running code from it, or not at all."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        yield problem("HS602", where=str(path), got=str(e), expected="the JSON config of a model",
                      fix="give the folder of a model that Transformers can load")  # fmt: skip
        return
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        if CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
            yield problem("HS410", where=str(path), got=f"model_type {model_type}", expected="a causal language model",
                          fix="give a model that generates text from text")  # fmt: skip
    elif isinstance(config, dict) and config.get("auto_map"):
        yield problem("HS410", where=str(path), got=f"model_type {model_type}, with code of its own (auto_map)",
                      expected="a model that Transformers knows: code from a model folder is never run",
                      fix="use a version of Transformers that has this model")  # fmt: skip
    else:
        yield problem("HS410", where=str(path), got=f"model_type {model_type}", expected="one that Transformers knows",
                      fix="install a version of Transformers that has this model")  # fmt: skip
