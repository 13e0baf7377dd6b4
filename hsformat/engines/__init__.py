"""What each engine calls a depth, as data and pure functions; no engine is imported.

``rules``          the form of a rule
``transformers``, ``vllm``, ``sglang``   one engine's rules each, with source, versions and evidence
``numbering``      from a capture to an engine's number and back
"""

from __future__ import annotations

from hsformat.engines.numbering import (
    ENGINES,
    EngineNumber,
    capture_of,
    describe_capture,
    engine_number,
    numbering_rule,
)
from hsformat.engines.rules import NumberingRule

__all__ = [
    "ENGINES",
    "EngineNumber",
    "NumberingRule",
    "capture_of",
    "describe_capture",
    "engine_number",
    "numbering_rule",
]
