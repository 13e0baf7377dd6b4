"""The tensors that turn a state into logits and tokens into depth 0: found by name, never assumed.

Aliases: one decoder is saved under many prefixes. A final norm that was not found and taken as ones cost a public
project its acceptance rate (speculators PR#1038), so nothing found is an error, and two found are an error too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy.typing as npt

from hsformat.digests import digest_json
from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.target.checkpoint import (
    Checkpoint,
    TensorInfo,
    digest_tensor,
    not_float,
    read_checkpoint,
    read_tensor,
)  # fmt: skip
from hsformat.target.config import read_config

__all__ = ["ALIASES", "Role", "basis_digest", "find_key_tensors", "key_tensors", "load_key_tensor", "shape_problems"]

Role = Literal["embedding", "final_norm", "final_norm_bias", "lm_head", "lm_head_bias"]
KeyTensors = Mapping[Role, TensorInfo | None]

_DECODERS = (
    "model.", "language_model.model.", "model.language_model.", "model.language_model.model.", "language_model.",
    "llm.model.", "llm.", "model.llm.", "", "model.decoder.",  # the last: OPTModel
)  # fmt: skip
_NORMS = (
    *(f"{d}norm" for d in _DECODERS),
    *("transformer.ln_f", "ln_f", "gpt_neox.final_layer_norm", "model.final_layernorm"),
    "transformer.norm_f",  # MptModel
    "model.decoder.final_layer_norm",  # OPTModel
    "model.layer_norm",  # XGLMModel
    "model.final_norm",  # RecurrentGemmaModel
    "model.embedding_norm",  # Lfm2Model: the final norm, by this name
)
_HEADS = ("lm_head", "language_model.lm_head", "model.language_model.lm_head", "llm.lm_head", "embed_out")

ALIASES: Mapping[Role, tuple[str, ...]] = {
    "embedding": (
        *(f"{d}embed_tokens.weight" for d in _DECODERS),
        *("transformer.wte.weight", "wte.weight", "gpt_neox.embed_in.weight"),
        "transformer.word_embeddings.weight",  # BloomModel, FalconModel
    ),
    "final_norm": tuple(f"{n}.weight" for n in _NORMS),
    "final_norm_bias": tuple(f"{n}.bias" for n in _NORMS),
    "lm_head": tuple(f"{h}.weight" for h in _HEADS),
    "lm_head_bias": tuple(f"{h}.bias" for h in _HEADS),
}
"""The names under which each role is looked for: those of checkpoints saved by Transformers 4 and 5, and of the
renamings in its conversion_mapping.py (read in 5.24.0)."""


def find_key_tensors(
    checkpoint: Checkpoint, *, tied: bool, norm_weight: bool | None = True, problems: list[Problem]
) -> KeyTensors:
    """Return the tensor of each role; None: there is none, or (added to ``problems``, HS411) it cannot be told.

    Of a tied pair one tensor is enough; it then stands for both roles. ``norm_weight`` says whether the final norm has
    a weight; None: not known yet, so that neither is a problem.
    """
    found: dict[Role, TensorInfo | None] = {}
    where = str(checkpoint.folder)
    for role, aliases in ALIASES.items():
        names = [name for name in aliases if name in checkpoint.tensors]
        found[role] = checkpoint.tensors[names[0]] if len(names) == 1 else None
        if len(names) > 1:
            fix = "remove the one that is not the target's; a guess is how a wrong norm is applied"
            problems.append(
                problem("HS411", where=f"{where}: {role}", got=", ".join(names), expected="one candidate", fix=fix)
            )
            tied = tied and role not in ("embedding", "lm_head")
    if tied:
        found["embedding"] = found["embedding"] or found["lm_head"]
        found["lm_head"] = found["lm_head"] or found["embedding"]
    ambiguous = {p.where for p in problems}
    if norm_weight is False and (info := found["final_norm"]) is not None:
        expected, fix = "none: the final norm has no weight", "remove it, or measure again: one of the two is wrong"
        problems.append(problem("HS411", where=f"{where}: final_norm", got=info.name, expected=expected, fix=fix))
    for role in ("embedding", "final_norm", "lm_head") if norm_weight else ("embedding", "lm_head"):
        if found[role] is None and f"{where}: {role}" not in ambiguous:
            got = "no tensor" + (" and tie_word_embeddings is false" if role == "lm_head" and not tied else "")
            problems.append(
                problem(
                    "HS411", where=f"{where}: {role}", got=got, expected=f"one of {', '.join(ALIASES[role])}",
                    fix="get the complete checkpoint; if it uses another name, hsformat must learn it first",
                )
            )  # fmt: skip
    return found


def shape_problems(tensors: KeyTensors, *, hidden_size: int, vocab_size: int) -> list[Problem]:
    """Return what contradicts the config: width (HS409), rows (HS411), or a dtype that is no plain float (HS411)."""
    problems = []
    for role, info in tensors.items():
        if info is None:
            continue
        rows = None if role.startswith("final_norm") else vocab_size
        width = None if role == "lm_head_bias" else hidden_size
        dimensions = ([f"{rows} or more"] if rows else []) + ([str(width)] if width else [])
        expected = f"[{', '.join(dimensions)}]"
        where, shape = f"{info.file}: {info.name}", info.shape
        if len(shape) != len(dimensions) or (rows is not None and shape[0] < rows):
            fix = "give the target's own folder, whole: these weights are not those of its config"
            problems.append(problem("HS411", where=where, got=list(shape), expected=expected, fix=fix))
        elif width is not None and shape[-1] != width:
            fix = "the folder's config and weights belong to different models"
            problems.append(problem("HS409", where=where, got=list(shape), expected=expected, fix=fix))
        if info.numpy_dtype is None:
            problems.append(not_float(info))
    return problems


def basis_digest(tensors: KeyTensors) -> tuple[str, bool]:
    """Return the basis digest, and whether the head has the embedding's bytes.

    The digest of the canonical JSON of an object with one entry a role: null for none, ``{"dtype", "shape",
    "bytes"}`` with the digest of the raw bytes for a tensor, and ``"tied"`` for an ``lm_head`` that equals the
    embedding in all three, so that a checkpoint which stores the tied matrix twice has the digest of one which
    does not. It tells a rotated target (QuaRot: vllm-ascend#5974) from the original, and reads these tensors alone.
    """
    seen: dict[TensorInfo, str] = {}
    entries: dict[str, Any] = {}
    for role in get_args(Role):
        info = tensors[role]
        if info is not None and info not in seen:
            seen[info] = digest_tensor(info)
        entries[role] = info and {"dtype": info.dtype, "shape": list(info.shape), "bytes": seen[info]}
    tied = entries["lm_head"] == entries["embedding"]
    return digest_json({**entries, "lm_head": "tied" if tied else entries["lm_head"]}), tied


def key_tensors(folder: str | Path) -> KeyTensors:
    """Return where the tensor of each role is in a model folder; None for a bias that there is not.

    Raises
    ------
    ForeignFileError
        HS411, HS601, HS602, HS603: the folder has no such tensors or cannot be read.
    """
    path = Path(folder)
    problems: list[Problem] = []
    tensors = find_key_tensors(read_checkpoint(path), tied=read_config(path).tied, problems=problems)
    if problems:
        raise ForeignFileError(problems)
    return tensors


def load_key_tensor(folder: str | Path, role: Role) -> npt.NDArray[Any] | None:
    """Return one key tensor as stored (bfloat16 as ``ml_dtypes``), reading no other; None for a bias that there is not.

    ``lm_head`` of a tied model is the embedding. [rows, H] for embedding and lm_head, [H] for the final norm.

    Raises
    ------
    ForeignFileError
        HS411, HS601, HS602, HS603: the folder has no such tensor or cannot be read.
    """
    info = key_tensors(folder)[role]
    return None if info is None else read_tensor(info)
