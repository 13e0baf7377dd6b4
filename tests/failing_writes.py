"""A local disk that fails from a call on, and the code that an action is refused with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from hsformat.problems import Severity, StoreError
from hsformat.store.local import LocalBackend

__all__ = ["code_of", "fail_after"]


def code_of(action: Callable[[], Any]) -> str:
    with pytest.raises(StoreError) as e:
        action()
    (p,) = e.value.problems
    assert p.severity is Severity.ERROR
    return p.code


def fail_after(monkeypatch: pytest.MonkeyPatch, method: str, calls: int, number: int) -> None:
    """Let a method of the backend fail from its ``calls``-th call on, after half of the bytes."""
    real, count = getattr(LocalBackend, method), iter(range(10_000))

    def failing(self: LocalBackend, key: str, *data: bytes) -> None:
        if next(count) < calls:
            real(self, key, *data)
            return
        if method == "write":
            real(self, key, data[0][: len(data[0]) // 2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalBackend, method, failing)
