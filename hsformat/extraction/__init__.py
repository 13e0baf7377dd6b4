"""Extraction: the seam to engines (``protocol``), finding them (``registry``) and running them (``driver``)."""

from __future__ import annotations

from hsformat.extraction.driver import ExtractionReport, extract_to_store
from hsformat.extraction.plan import eagle3_depths, make_contract
from hsformat.extraction.protocol import ExtractionRequest, Extractor, Measures, Rejected
from hsformat.extraction.registry import available, find_extractor

__all__ = [
    "ExtractionReport",
    "ExtractionRequest",
    "Extractor",
    "Measures",
    "Rejected",
    "available",
    "eagle3_depths",
    "extract_to_store",
    "find_extractor",
    "make_contract",
]
