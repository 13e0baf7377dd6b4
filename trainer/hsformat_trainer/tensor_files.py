"""Safetensors files that others may read, as the umask says: safetensors 0.8 leaves files of mode 0600 behind."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write tensors, contiguous and on the CPU, with the mode of any other new file.

    Raises
    ------
    OSError
        It cannot be written; safetensors' own ``SafetensorError`` where the disk is full.
    """
    from safetensors.torch import save_file

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)
