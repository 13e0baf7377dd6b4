"""The weights of a draft: names and shapes against what an engine loads, from safetensors headers alone.

Engines leave a weight that is missing or misnamed at its random start, mostly without a word. May import ``sizes`` and
``options``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hsformat.engines.drafts import Draft
from hsformat.engines.options import DraftOptions, norm_weight_owner
from hsformat.engines.rows import DraftRow
from hsformat.engines.sizes import DraftSizes, LatentSizes
from hsformat.problems import Problem, Severity, problem

__all__ = ["EMBEDDING", "HEAD", "check_weights", "find_weight"]

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

_QKV = ("q_proj", "k_proj", "v_proj")
_WIDTHS = ("hidden", "captures")
"""Kinds of dimensions that come from a model's width: a wrong one is HS409, another wrong one HS411."""


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dimension of a weight: its size, and what it is."""

    size: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    dims: tuple[_Dim, ...]


def find_weight(draft: Draft, row: DraftRow, name: str) -> str | None:
    """Return the name that a weight has in the folder; None: it has none that the engine loads."""
    first = f"{row.layer_names[0]}."
    names = [name]
    if name.startswith(first):
        names = [f"{layer}.{name.removeprefix(first)}" for layer in row.layer_names]
    names += [n.replace(part, other) for n in names for part, other in row.loads.other_names.items() if part in n]
    prefixes = ("",) if name == HEAD else row.weight_prefixes  # the head stands beside the model, not in it
    there = [f"{prefix}{n}" for n in names for prefix in prefixes if f"{prefix}{n}" in (draft.shapes or ())]
    return there[0] if there else None


def check_weights(
    draft: Draft,
    sizes: DraftSizes,
    row: DraftRow,
    options: DraftOptions,
    *,
    captures: int,
    fed: Sequence[int] | None,
    title: str,
) -> list[Problem]:
    """Return what is missing or of another shape: HS402 (width of fc), HS409, HS411.

    Parameters
    ----------
    captures
        Number of aux captures that the engine makes ``fc`` take.
    fed
        Depths that the draft is fed, for the problem; None: not known.
    """
    if draft.shapes is None:
        return []
    expected = list(_expected(sizes, row, options, captures))
    if draft.decoder.get("quantization_config") not in (None, {}):
        return list(_quantised(draft, sizes, row, expected, captures, fed, title))
    problems = []
    found = [(w, find_weight(draft, row, w.name)) for w in expected]
    used = {name for _, name in found if name is not None}
    for weight, name in found:
        if name is None:
            problems.append(_missing(draft, row, weight, used, title))
        elif (wrong := _shape_problem(draft, sizes, weight, name, captures, fed)) is not None:
            problems.append(wrong)
    shared = (find_weight(draft, row, EMBEDDING), find_weight(draft, row, HEAD))
    problems += [wrong for n in (*sorted(used), *shared) if n and (wrong := _dtype_problem(draft, n)) is not None]
    # Later layers have both norms as modules and use one of them.
    used |= {f"layers.{i}.{n}.weight" for i in range(1, sizes.num_layers) for n in ("hidden_norm", "input_layernorm")}
    return problems + list(_unknown(draft, row, options, used, title))


def _quantised(
    draft: Draft,
    sizes: DraftSizes,
    row: DraftRow,
    expected: Sequence[_Weight],
    captures: int,
    fed: Sequence[int] | None,
    title: str,
) -> Iterator[Problem]:
    """Yield what can be told of a quantised draft: norms, which no method quantises, and whether ``fc`` is there."""
    fix = "serve it and look at the engine's log"
    got = "a quantised draft, whose other weights than norms have other names and shapes"
    where = draft.at(f"{draft.decoder_prefix}quantization_config")
    yield _problem("HS411", where, got, "unquantised weights, which can be checked", fix, Severity.WARNING)
    for weight in expected:
        name = find_weight(draft, row, weight.name)
        info = draft.tensors.get(name or "")
        whole = weight.name == "fc.weight" and info is not None and info.numpy_dtype is not None
        if whole or "norm" in weight.name:
            if name is None:
                yield _missing(draft, row, weight, set(), title)
            elif (wrong := _shape_problem(draft, sizes, weight, name, captures, fed)) is not None:
                yield wrong
        elif weight.name == "fc.weight" and not any(
            n.startswith(f"{prefix}fc.") for n in draft.shapes or () for prefix in row.weight_prefixes
        ):
            yield _missing(draft, row, weight, set(), title)


def _expected(sizes: DraftSizes, row: DraftRow, options: DraftOptions, captures: int) -> Iterator[_Weight]:
    hidden = _Dim(sizes.hidden_size, "hidden")
    wide = _Dim(sizes.target_hidden_size * captures, "captures")
    yield _Weight("fc.weight", (hidden, wide))
    if options.fc_bias:
        yield _Weight("fc.bias", (hidden,))
    if options.norm_before_fc:
        yield _Weight("input_norm.weight", (wide,))
    if options.fc_norm:
        for i in range(captures):
            yield _Weight(f"fc_norm.{i}.weight", (_Dim(sizes.target_hidden_size, "hidden"),))
    yield _Weight("norm.weight", (hidden,))
    for layer in range(sizes.num_layers):
        prefix = row.layer_names[0] if layer == 0 else f"layers.{layer}"
        width = _Dim(2 * sizes.hidden_size, "hidden") if layer == 0 else hidden
        norms = ["post_attention_layernorm"]
        norms += ["hidden_norm", "input_layernorm"] if layer == 0 else [row.later_layers_norm]
        for norm in norms:
            yield _Weight(f"{prefix}.{norm}.weight", (hidden,))
        for name, dims in _attention(sizes, row, width, hidden).items():
            yield _Weight(f"{prefix}.self_attn.{name}.weight", dims)
            if options.output_bias if name == "o_proj" else options.attention_bias and name in _QKV:
                yield _Weight(f"{prefix}.self_attn.{name}.bias", dims[:1])
        inner = _Dim(sizes.intermediate_size)
        for name in ("gate_proj", "up_proj", "down_proj"):
            dims = (hidden, inner) if name == "down_proj" else (inner, hidden)
            yield _Weight(f"{prefix}.mlp.{name}.weight", dims)
            if options.mlp_bias:
                yield _Weight(f"{prefix}.mlp.{name}.bias", dims[:1])


def _attention(sizes: DraftSizes, row: DraftRow, width: _Dim, hidden: _Dim) -> Mapping[str, tuple[_Dim, ...]]:
    if sizes.latent is not None:
        return _latent(sizes.latent, sizes.num_heads, width, hidden)
    q, kv = _Dim(sizes.num_heads * sizes.head_dim), _Dim(sizes.num_kv_heads * sizes.head_dim)
    out = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (hidden, q)}
    head = (_Dim(sizes.head_dim),)
    return {**out, "q_norm": head, "k_norm": head} if row.attention == "qwen3" else out


def _latent(latent: LatentSizes, heads: int, width: _Dim, hidden: _Dim) -> Mapping[str, tuple[_Dim, ...]]:
    out = {
        "kv_a_proj_with_mqa": (_Dim(latent.kv_rank + latent.rope), width),
        "kv_a_layernorm": (_Dim(latent.kv_rank),),
        "kv_b_proj": (_Dim(heads * (latent.nope + latent.value)), _Dim(latent.kv_rank)),
        "o_proj": (hidden, _Dim(heads * latent.value)),
    }
    queries = _Dim(heads * (latent.nope + latent.rope))
    if latent.query_rank is None:
        return {**out, "q_proj": (queries, width)}
    rank = _Dim(latent.query_rank)
    return {**out, "q_a_proj": (rank, width), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}


def _missing(draft: Draft, row: DraftRow, weight: _Weight, used: set[str], title: str) -> Problem:
    shown = [f"{prefix}{weight.name}" for prefix in row.weight_prefixes]
    got = "no such weight"
    last = weight.name.split(".", 1)[1] if weight.name.startswith(row.layer_names[0]) else weight.name
    if alike := sorted(
        n for n in draft.shapes or () if f".{n}".endswith(f".{last}") and n not in used and norm_weight_owner(n) is None
    )[:2]:
        got += f"; the folder has {', '.join(alike)}, which {title} does not load for it"
    shape = _shape(weight)
    fix = f"export the draft again: {title} leaves it at its random start and says nothing"
    return _problem("HS411", f"{draft.where}: {weight.name}", got, f"{' or '.join(shown)} {shape}", fix)


def _shape_problem(
    draft: Draft, sizes: DraftSizes, weight: _Weight, name: str, captures: int, fed: Sequence[int] | None
) -> Problem | None:
    shape = (draft.shapes or {})[name]
    where, expected = f"{draft.where}: {name}", _shape(weight)
    if len(shape) == len(weight.dims):
        wrong = [d for d, n in zip(weight.dims, shape, strict=True) if n != d.size]
        if not wrong:
            return None
        slots, rest = divmod(shape[-1], sizes.target_hidden_size)
        if wrong == [weight.dims[-1]] and wrong[0].kind == "captures" and slots and not rest:
            layers = "" if fed is None else f": [{', '.join(f'd{d}' for d in fed)}]"
            got = f"{list(shape)}: {slots} captures of {sizes.target_hidden_size}"
            fix = "state num_aux_hidden_states and as many layer ids as the draft was trained with"
            return _problem("HS402", where, got, f"{expected}: {captures} captures{layers}", fix)
        if any(d.kind in _WIDTHS for d in wrong):
            fix = "config and weights are of different models, or the draft is of another target"
            return _problem("HS409", where, str(list(shape)), expected, fix)
    return _problem("HS411", where, str(list(shape)), expected, "config and weights are of different models")


def _dtype_problem(draft: Draft, name: str) -> Problem | None:
    """Return HS411 for a dtype that is no float of 16 bits or more: loaders copy its numbers without their scales."""
    info = draft.tensors.get(name)
    if info is None or info.numpy_dtype is not None:
        return None
    fix = "export the weights as bfloat16, or state the quantization_config by which they are read"
    expected = "BF16, F16, F32 or F64 in a draft without quantization_config"
    return _problem("HS411", f"{draft.where}: {name}", f"dtype {info.dtype}", expected, fix)


def _unknown(draft: Draft, row: DraftRow, options: DraftOptions, used: set[str], title: str) -> Iterator[Problem]:
    """Yield the weights that nothing takes: trained ones of a layer are lost, others are reported."""
    shared = {HEAD, *(f"{prefix}{EMBEDDING}" for prefix in row.weight_prefixes)}
    for name in sorted(draft.shapes or ()):
        known = name in used or name in shared or "t2d" in name or "d2t" in name or "rotary_emb" in name
        owner = norm_weight_owner(name)
        if known or (owner is not None and not getattr(options, owner)):  # of a norm that is off: options says it
            continue
        dropped = row.unknown_weights == "dropped" or name.endswith(".bias")
        if any(part in name for part in row.loads.skipped):
            got = f"a weight that {title} leaves out with a warning of its own"
            fix = "nothing, if the draft is to be served without it"
            expected = "weights that it loads"
            yield _problem("HS411", f"{draft.where}: {name}", got, expected, fix, Severity.WARNING)
            continue
        if (twin := _twin(name, used, row)) is not None:  # both are renamed to one parameter, and both are loaded
            got = f"a weight for which the folder has {twin}, too: {title} loads both into one, the last that it meets"
            fix = "leave one of them"
            yield _problem("HS411", f"{draft.where}: {name}", got, "one weight for each parameter", fix)
            continue
        got = f"a weight that {title} {'drops without a word' if dropped else 'fails to load'}"
        inside = name.rpartition("model.")[2].startswith((*row.layer_names, "midlayer.", "layers.", "fc."))
        severity = Severity.ERROR if inside or not dropped else Severity.WARNING
        fix = "export the weights that the engine loads, under its names"
        yield _problem("HS411", f"{draft.where}: {name}", got, "weights of the names that it loads", fix, severity)


def _twin(name: str, used: set[str], row: DraftRow) -> str | None:
    """Return the weight that is loaded into the same parameter under another name."""
    return next((n for n in sorted(used) if n != name and _parameter(n, row) == _parameter(name, row)), None)


def _parameter(name: str, row: DraftRow) -> str:
    """Return one name for all names of a parameter.

    vLLM 0.32.0 model_executor/models/llama_eagle3.py (hf_to_vllm_mapper), SGLang 0.5.23 models/llama_eagle3.py
    (legacy_name_map).
    """
    for prefix in row.weight_prefixes:
        name = name.removeprefix(prefix)
    for layer in row.layer_names:
        if name.startswith(f"{layer}."):
            return f"{row.layer_names[0]}.{name.removeprefix(f'{layer}.')}"
    return name


def _shape(weight: _Weight) -> str:
    return f"[{', '.join(str(d.size) for d in weight.dims)}]"


def _problem(code: str, where: str, got: str, expected: str, fix: str, severity: Severity | None = None) -> Problem:
    return problem(code, where=where, got=got, expected=expected, fix=fix, severity=severity)
