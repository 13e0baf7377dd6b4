"""Shared set-up: Hypothesis profiles, and contract and record fixtures built by ``factories``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # ``from factories import ...`` in any test

from factories import tiny_contract

from hsformat.contract import Contract

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture
def contract() -> Contract:
    """Return a tiny valid contract."""
    return tiny_contract()
