"""Preparation: conversations or token ids in a file to token samples, with a loss mask that is proved or refused.

The stations, each behind its own type: ``rows`` (file -> Row) -> ``conversation`` (Row -> Conversation or TokenRow)
-> ``render`` (Conversation -> ids and mask) -> ``pipeline`` (length, checks, counts -> TokenSample). Importing it
brings no transformers.
"""

from __future__ import annotations

from hsformat.prepare.pipeline import Preparation, prepare
from hsformat.prepare.rows import count_rows
from hsformat.prepare.summary import Summary
from hsformat.prepare.tokenizer import load_tokenizer

__all__ = ["Preparation", "Summary", "count_rows", "load_tokenizer", "prepare"]
