"""What each engine does with a target and a draft, as data and pure functions; no engine is imported.

``rows``                       the form of what is known: rows with versions, source and evidence
``transformers``, ``vllm``, ``sglang``   one engine's rows each
``table``                      all of them, and finding the row that holds
``profile``                    rows that a probe proved, as a file
``custom``                     a layout that somebody states
``ids``                        from ids to depths and back
``numbering``                  from one capture to an engine's number and back
``targets``, ``drafts``        what is read of a target and of a draft folder
``filled``, ``sizes``          what a config class fills in; sizes, stated or filled in
``layer_ids``, ``fc_inputs``, ``options``, ``positions``, ``vocabulary``, ``weights``, ``sharing``   one part each
``inspection``                 all parts: what an engine will do with a draft
``matching``                   the ids with which data would fit
``emission``                   the config keys that make an engine do what is asked
``words``                      layouts in plain words, and the tables as a document
"""

from __future__ import annotations

from hsformat.engines.emission import DraftConfig, emit, emit_for
from hsformat.engines.inspection import inspect, resolve
from hsformat.engines.numbering import (
    EngineNumber,
    capture_of,
    describe_capture,
    engine_number,
    numbering_row,
)
from hsformat.engines.profile import EngineProfile, load_profile, save_profile
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.engines.table import ENGINES, known_versions

__all__ = [
    "ENGINES",
    "CaptureRow",
    "DraftConfig",
    "DraftRow",
    "EngineNumber",
    "EngineProfile",
    "capture_of",
    "describe_capture",
    "emit",
    "emit_for",
    "engine_number",
    "inspect",
    "known_versions",
    "load_profile",
    "numbering_row",
    "resolve",
    "save_profile",
]
