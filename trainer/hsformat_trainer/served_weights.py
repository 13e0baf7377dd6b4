"""The weights of a draft folder as engines load it, under the names that a draft has in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.target.checkpoint import TensorInfo, read_checkpoint
from hsformat_trainer.draft_files import weight_shapes
from hsformat_trainer.draft_spec import DraftSpec
from hsformat_trainer.finite import weights_not_finite

__all__ = ["load_served"]

_LAYER = "layers.0"
_FLOATS = ("BF16", "F16", "F32", "F64")
"""As safetensors names them."""
_SHARED = ("lm_head.weight", "embed_tokens.weight")
"""Which engines take from the target where a folder has none."""


def load_served(folder: str | Path, spec: DraftSpec) -> dict[str, torch.Tensor]:
    """Return a folder's weights in float32; of the shared ones, those that it has and that the draft has, too.

    The vocabulary map is left out, as are norms of later layers that the engine does not apply.

    Raises
    ------
    ForeignFileError
        HS411: a weight is missing, has another shape or no floating type, or is none of such a draft. HS201: it holds
        NaN, or what is infinite in float32. HS601, HS602: the folder cannot be read.
    """
    infos = {
        _training_name(name): info for name, info in read_checkpoint(Path(folder), every_file=True).tensors.items()
    }
    expected = dict(weight_shapes(spec, first_layer=_LAYER))
    expected.pop("d2t", None)
    if problems := list(_problems(infos, expected, spec, str(folder))):
        raise ForeignFileError(problems)
    weights = {name: _read(infos[name]) for name in expected if name in infos}
    fix = "begin with a draft whose weights are finite, or with a new one"
    if problems := [
        found
        for name, tensor in weights.items()
        for found in weights_not_finite([(infos[name].name, tensor)], where=str(infos[name].file), fix=fix)
    ]:
        raise ForeignFileError(problems)
    return weights


def _training_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"{_LAYER}.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _problems(
    infos: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], spec: DraftSpec, where: str
) -> Iterator[Problem]:
    unused = {f"layers.{i}.{n}.weight" for i in range(1, spec.num_layers) for n in ("hidden_norm", "input_layernorm")}
    for name in sorted({*expected, *infos}):
        place = f"{where}: {name}"
        if name not in infos:
            if name not in _SHARED:
                yield problem("HS411", where=place, got="no such weight", expected=list(expected[name]))
        elif name in expected:
            if infos[name].shape != expected[name]:
                yield problem("HS411", where=place, got=list(infos[name].shape), expected=list(expected[name]))
            elif infos[name].dtype not in _FLOATS:
                fix = "begin with a draft that is not quantised, or with a new one"
                yield problem("HS411", where=place, got=infos[name].dtype, expected=" or ".join(_FLOATS), fix=fix)
        elif not (name in _SHARED or name in unused or "d2t" in name or "t2d" in name or "rotary_emb" in name):
            got, fix = f"a weight {list(infos[name].shape)}", "begin a new draft, or one of this shape"
            yield problem("HS411", where=place, got=got, expected="no such weight", fix=fix)


def _read(info: TensorInfo) -> torch.Tensor:
    try:
        with safe_open(info.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(info.name)
    except (OSError, SafetensorError) as e:
        raise ForeignFileError(problem("HS602", where=str(info.file), got=e, expected="safetensors")) from e
    return tensor.float()
