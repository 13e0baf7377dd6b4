"""How far states of one and the same computation may differ, by the dtype that the target runs in. No torch."""

from __future__ import annotations

__all__ = ["BATCH_TOLERANCE", "TOLERANCE"]

TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Mean relative error of a row for one and the same computation: some 10 roundings of the dtype."""
BATCH_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
"""As above for other shapes: rounding grows with depth (2.2e-2 over 30 layers in bfloat16 on random ids), and an expert
may be routed differently. A sequence that sees its neighbour or its padding is off by the order of 1."""
