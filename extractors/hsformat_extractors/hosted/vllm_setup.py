"""What vLLM is started with so that it gives states: layer ids, speculative decoding's stand-in, the KV connector.

Pure functions, without vLLM: the driver that loads vLLM uses them, and the command that prints how to start a server.
vLLM 0.32.0 takes states out by a speculative method that drafts nothing (``extract_hidden_states``): captured states go
into a KV cache of their own (``v1/spec_decode/extract_hidden_states.py``), a connector writes them when a request ends
(``distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py``).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsformat.engines.ids import capturable, ids_of
from hsformat.engines.profile import load_profile
from hsformat.engines.rows import parse_depth
from hsformat.engines.table import capture_row
from hsformat.layout import parse_capture_key
from hsformat.problems import HsError, Problem, problem
from hsformat_extractors.hosted.wire import Fault

__all__ = [
    "CONNECTOR", "CONNECTOR_MODULE", "CPU_ENVIRONMENT", "DEVICE", "EXTRA", "FAILED", "Slots", "not_written",
    "speculation", "transfer", "wanted_slots",
]  # fmt: skip

CONNECTOR = "HiddenStatesConnector"
CONNECTOR_MODULE = "hsformat_extractors.hosted.vllm_connector"
EXTRA = "hsformat"
"""Key of what our connector is told, in ``kv_connector_extra_config``, and of the same in the files that it writes."""

FAILED = ".failed"
"""Ends the name of a file that our connector writes in place of a file of states: its text says why there is none.
Empty: not even that could be written."""

DEVICE = "device"
"""Key of vLLM's kind of device, beside what our connector was told, in the files that it writes."""

CPU_ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""What vLLM needs where there is no accelerator: GiB of its cache, which it would take of all memory; threads that are
bound to no core."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What vLLM captures, and which capture comes from where.

    Attributes
    ----------
    ids
        Layer ids as vLLM counts them, ascending, each once: it sorts what it is given and drops what is double.
    depths
        Of the ids, in the same order.
    keys
        Of each capture wanted, its slot and whether the final norm is still to be applied: vLLM captures depth N before
        it.
    """

    ids: tuple[int, ...]
    depths: tuple[int, ...]
    keys: Mapping[str, tuple[int, bool]]

    @property
    def normed(self) -> bool:
        """Whether a capture is after the final norm."""
        return any(normed for _, normed in self.keys.values())


def wanted_slots(
    captures: Sequence[str], *, version: str, architecture: str, num_layers: int, profile: str | None = None
) -> Slots:
    """Return which layer ids give these captures.

    Parameters
    ----------
    captures
        Keys, such as ``d2`` and ``d30n``.
    version
        Of vLLM, as pip shows it.
    profile
        File of a profile, for a version or an architecture that the tables do not know (``hsformat engines probe``).

    Raises
    ------
    ResolveError
        HS410: version and architecture are not known together.
    HsError
        HS504, HS602, HS603: the profile cannot be read.
    HsError
        HS304: a text is no key, or a norm is asked for below depth N; HS410: vLLM does not capture a depth of this
        architecture.
    """
    row = capture_row("vllm", version, architecture, None if profile is None else load_profile(profile))
    parsed = _parsed(captures, num_layers)
    depths = sorted({depth for depth, _ in parsed.values()})
    ids = ids_of(row, depths, num_layers)
    if ids is None or row.norm != "none":
        lost = [d for d in depths if not capturable(row, d, num_layers)]
        deepest = parse_depth(row.deepest, num_layers)
        raise HsError(
            problem("HS410", where=f"vLLM {version}: {architecture}", got=f"depths {lost or depths}",
                    expected=f"depths {row.lowest} to {deepest} of {num_layers} layers",
                    fix="ask for depths that this engine captures, or use another engine")
        )  # fmt: skip
    keys = {key: (depths.index(depth), normed) for key, (depth, normed) in parsed.items()}
    return Slots(ids=tuple(ids), depths=tuple(depths), keys=keys)


def _parsed(captures: Sequence[str], n: int) -> dict[str, tuple[int, bool]]:
    """Return depth and whether it is after the final norm, of each key.

    Raises
    ------
    HsError
        HS304, one problem a key that no target of ``n`` layers has.
    """
    found: dict[str, tuple[int, bool]] = {}
    problems: list[Problem] = []
    for key in captures:
        try:
            depth, normed = found[key] = parse_capture_key(key)
        except ValueError:
            problems.append(
                problem("HS304", where="captures", got=repr(key),
                        expected=f"d0 to d{n}, or d{n}n after the final norm",
                        fix="name captures with commas between, such as d1,d2")
            )  # fmt: skip
            continue
        if normed and depth != n:
            problems.append(
                problem("HS304", where=f"capture {key}", got=f"the final norm at depth {depth}",
                        expected=f"the final norm at depth {n} alone", fix=f"ask for d{n}n, or for d{depth}")
            )  # fmt: skip
    if problems:
        raise HsError(problems)
    return found


def speculation(slots: Slots) -> dict[str, Any]:
    """Return vLLM's ``speculative_config``: one token, which the method demands, and the layer ids."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(slots.ids)}},
    }


def transfer(slots: Slots, *, storage: str, final_norm: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config``: our connector, and what it is told.

    Parameters
    ----------
    storage
        The folder that files are written to.
    final_norm
        ``kind``, ``eps``, ``unit_offset`` of the target's final norm; needed where a capture is after it.
    """
    told = {"ids": list(slots.ids), "keys": {key: list(value) for key, value in slots.keys.items()}}
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": storage,
            # A file of ours appears whole, under its name, or not at all: no lock is needed to wait for it.
            "use_synchronization_lock": False,
            EXTRA: {**told, "final_norm": dict(final_norm) if final_norm is not None else None},
        },
    }


def not_written(request: str, failed: Path) -> Fault:
    """Return the fault of a request whose states the connector could not write, and remove what it says of it.

    Raises
    ------
    OSError
        ENOSPC: the disk is full, so that no other request will fare better.
    """
    message = failed.read_text(encoding="utf-8") or os.strerror(errno.ENOSPC)
    failed.unlink(missing_ok=True)
    if "No space left on device" in message or "Disk quota exceeded" in message:
        raise OSError(errno.ENOSPC, message, str(failed.parent))
    return Fault(request=request, message=f"its states were not written: {message}", again=True)
