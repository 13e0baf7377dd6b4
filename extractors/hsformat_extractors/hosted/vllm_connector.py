"""The KV connector that vLLM runs in its worker: states go from its cache into a file of the wire's form.

Loaded by vLLM alone (``kv_connector_module_path``). It is vLLM's own connector (0.32.0,
``distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py``) but for two things. Where the cache is
in host memory the original dies, since it copies through pinned memory and a CUDA stream; on an accelerator that
code is used as it is. And the original writes one tensor [T, S, H] under a lock; this one writes [T, H] a capture under
another name, and renames the file when it is whole.

Shapes: T tokens, S slots, H hidden.
"""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)

from hsformat.dtypes import as_array
from hsformat.maintain.finalnorm import FinalNormWeights
from hsformat_extractors.hosted.final_norm import after, load_weights
from hsformat_extractors.hosted.vllm_setup import DEVICE, EXTRA, FAILED
from hsformat_extractors.hosted.wire import TOKENS

__all__ = ["HiddenStatesConnector"]


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Writes the captures that it is told to, each under its key.

    What it is told (``kv_connector_extra_config["hsformat"]``): ``ids``, the layer ids that the engine must have been
    started with; ``keys``, of each capture its slot and whether the final norm is to be applied; ``final_norm``.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        told = self._kv_transfer_config.get_from_extra_config(EXTRA, None)
        if told is None:
            raise ValueError(f"kv_connector_extra_config has no {EXTRA!r}: start vLLM as hosted.vllm_serve prints")
        hf_config = vllm_config.speculative_config.draft_model_config.hf_config
        started = list(hf_config.eagle_aux_hidden_state_layer_ids)
        if started != told["ids"]:
            raise ValueError(f"vLLM captures the layer ids {started}, and the connector is told of {told['ids']}")
        self._keys: dict[str, tuple[int, bool]] = {
            k: (int(slot), bool(normed)) for k, (slot, normed) in told["keys"].items()
        }
        self._final_norm: dict[str, Any] | None = told["final_norm"]
        self._norm: FinalNormWeights | None = None
        self._folder = str(vllm_config.model_config.model)
        self._about = {EXTRA: json.dumps({**told, DEVICE: str(vllm_config.device_config.device_type)})}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the cache of states, after checking that it has a slot for each layer id."""
        super().register_kv_caches(kv_caches)
        slots = self._kv_cache.shape[1]  # [blocks, slots, block size, H]
        if slots != self.num_hidden_states:
            raise ValueError(f"the cache of states has {slots} slots for {self.num_hidden_states} layer ids")
        if any(normed for _, normed in self._keys.values()):
            self._norm = load_weights(self._folder, self._final_norm or {})

    def _submit_async_write(self, pending: Any) -> None:
        cache = self._kv_cache
        if cache is not None and cache.device.type != "cpu":
            super()._submit_async_write(pending)  # calls _write_tensors in a thread when the rows are in host memory
            return
        if not self._is_tp_rank_zero:
            return
        tokens_T = torch.arange(len(pending.token_ids))
        block_ids = torch.tensor(pending.block_ids, dtype=torch.long)
        if len(block_ids) * self._block_size < len(tokens_T):  # it was aborted between two passes of its prompt
            self._req_copy_events[pending.req_id] = _DONE
            _note(pending.filename, f"{len(block_ids)} blocks of {self._block_size} for {len(tokens_T)} tokens")
            if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
                os.close(lock)
            return
        blocks_T, within_T = block_ids[tokens_T // self._block_size], tokens_T % self._block_size
        # Copied before this returns: the blocks belong to others as soon as the request counts as sent.
        rows = [cache[blocks_T, slot, within_T] for slot in range(cache.shape[1])]
        self._req_copy_events[pending.req_id] = _DONE
        lock = self._lock_fds.pop(pending.req_id, None)
        write = partial(self._write, rows, pending.token_ids.clone(), pending.filename, lock)
        future = self._executor.submit(write)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """In a thread of the original's: wait for the copy of [T, S, H] from the device, then write."""
        event.synchronize()
        rows = tensors["hidden_states"]
        self._write([rows[:, slot] for slot in range(rows.shape[1])], tensors["token_ids"], filename, lock_fd)

    def _write(self, rows: list[torch.Tensor], token_ids: torch.Tensor, filename: str, lock_fd: int | None) -> None:
        """Write one file. A failure is written beside it, since nobody waits for what this thread raises."""
        part = f"{filename}.part"
        try:
            os.makedirs(os.path.dirname(filename), exist_ok=True)
            save_file({**self._captures(rows), TOKENS: token_ids}, part, metadata=self._about)
            os.replace(part, filename)
        except (OSError, RuntimeError, ValueError, SafetensorError) as e:
            with contextlib.suppress(OSError):
                Path(part).unlink(missing_ok=True)
            _note(filename, f"{type(e).__name__}: {e}")
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    def _captures(self, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return [T, H] of each capture."""
        out = {}
        for key, (slot, normed) in self._keys.items():
            h_TH = rows[slot].contiguous()
            if normed and self._norm is not None:
                normed_TH = after(self._norm, as_array(h_TH))
                h_TH = torch.from_numpy(normed_TH.view(np.uint8)).view(h_TH.dtype)
            out[key] = h_TH
        return out


def _note(filename: str, text: str) -> None:
    """Say beside a file why it is not there; no reader sees half of it. Where there is no space for it, it is empty."""
    part = Path(f"{filename}{FAILED}.part")
    with contextlib.suppress(OSError):
        part.write_text(text, encoding="utf-8")
    with contextlib.suppress(OSError):  # whoever waits for it gives up in time
        os.replace(part, filename + FAILED)


class _Done:
    """In place of a CUDA event: the copy is done when it is asked for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_DONE = _Done()
