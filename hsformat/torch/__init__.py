"""Records as tensors: a dataset, a loader and packing, for whatever trains on a store or another source.

============ ===============================================================================
``tensors``  one record as tensors, bfloat16 without a copy
``dataset``  :class:`RecordDataset`, map-style, for any DataLoader
``plan``     which records are in which batch: by seed and epoch alone; knows no torch
``packing``  :func:`pack`: records one after another, without padding
``position`` where a loader is in its epochs, for a checkpoint
``loader``   :class:`RecordLoader`: one order for any workers, shared by ranks, resumed anywhere
``prefetch`` threads and processes that read ahead
============ ===============================================================================

Needs ``pip install 'hsformat[train]'``; ``import hsformat`` does not import it. docs/guides/loading.md has a worked
example. Nothing here shifts: that is :mod:`hsformat.align`.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401 - only to say what is missing
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"hsformat.torch needs {e.name}: pip install 'hsformat[train]'", name=e.name) from e

from hsformat.torch.dataset import RecordDataset
from hsformat.torch.loader import RecordLoader
from hsformat.torch.packing import Packed, pack
from hsformat.torch.tensors import TensorRecord, tensor_record

__all__ = ["Packed", "RecordDataset", "RecordLoader", "TensorRecord", "pack", "tensor_record"]
