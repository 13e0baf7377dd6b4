"""The conformance suite passes for an honest engine in a child process: a Llama in NumPy, against Transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toys import GREEDY, TINY_LLAMA, ToyExtractor

from hsformat.testing import ExtractorConformance

pytestmark = pytest.mark.needs("torch")


class TestToyEngine(ExtractorConformance):
    extractor = ToyExtractor
    model = TINY_LLAMA
    generation: ClassVar = GREEDY
