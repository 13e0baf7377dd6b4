"""Builders of small valid objects, which are published in ``hsformat.testing``; a test imports them from here."""

from __future__ import annotations

from hsformat.testing.builders import assert_same_record, build_store, digest, tiny_contract, tiny_record

__all__ = ["assert_same_record", "build_store", "digest", "tiny_contract", "tiny_record"]
