"""Loading a target: its device, and its weights from safetensors alone."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from hsformat.problems import ForeignFileError, problem

__all__ = ["device_name", "find_device", "free", "load_model"]


def find_device(name: str) -> torch.device:
    """Return the device of an option ``device``: ``auto``, ``cpu``, ``cuda``, ``cuda:N``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda:0" if name == "cuda" else name)


def device_name(device: torch.device) -> str:
    """Return the device with the name of its model, for provenance."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def free(device: torch.device) -> None:
    """Give back the memory of models that nothing refers to any more; they hold cycles, so a collection is needed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def load_model(folder: Path, *, dtype: str, device: torch.device, attention: str | None) -> Any:
    """Load a causal LM from safetensors alone; no code and no pickle from its folder is run, nothing is downloaded.

    Raises
    ------
    ForeignFileError
        HS411, HS602; the cause is chained.
    """
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()  # the driver shows one of its own
    auto: Any = transformers.AutoModelForCausalLM
    chosen = {} if attention is None else {"attn_implementation": attention}
    if device.type == "cuda":
        chosen["device_map"] = str(device)  # shards go to the device one by one, not through host memory
    try:
        model, info = auto.from_pretrained(
            os.fspath(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **chosen,
        )
    except Exception as e:  # each quantisation and file format raises its own; all mean that the folder is no use
        code = "HS411" if isinstance(e, OSError) else "HS602"
        raise ForeignFileError(
            problem(code, where=str(folder), got=f"{type(e).__name__}: {e}",
                    expected=f"a causal LM that Transformers loads as {dtype}",
                    fix="check the folder with Transformers' AutoModelForCausalLM.from_pretrained")
        ) from e  # fmt: skip
    if absent := sorted(info["missing_keys"]):
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise ForeignFileError(
            problem("HS411", where=str(folder), got=f"no {shown}", expected="every weight of the model",
                    fix="complete the folder; Transformers leaves a missing weight at its random start")
        )  # fmt: skip
    if surplus := _surplus_layers(model, info["unexpected_keys"]):
        raise ForeignFileError(
            problem("HS301", where=str(folder), got=f"weights of more layers than the config has, such as {surplus[0]}",
                    expected=f"{model.config.get_text_config().num_hidden_layers} layers, as config.json says",
                    fix="correct num_hidden_layers; Transformers leaves such weights out, and the model is another one")
        )  # fmt: skip
    return model.eval()


def _surplus_layers(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the weights that were not loaded and have a twin in the model's first layer."""
    known = set(model.state_dict())
    return sorted(key for key in unexpected if re.sub(r"\.[1-9][0-9]*\.", ".0.", key, count=1) in known)
