"""What was refused, and about which record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hsformat.problems import StoreError


def refused(action: Callable[[], Any]) -> list[tuple[str, str | None]]:
    with pytest.raises(StoreError) as e:
        action()
    for p in e.value.problems:
        assert p.got != p.expected
    return [(p.code, p.id) for p in e.value.problems]
