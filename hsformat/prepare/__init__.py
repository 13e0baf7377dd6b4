"""Preparation: conversations or token ids in a file to token samples, with a loss mask that is proved or refused.

The stations, each behind its own type: ``rows`` (file -> Row; ``jsonlines``, ``arrow``) -> ``conversation`` (Row ->
Conversation or TokenRow; ``messages``) -> ``render`` (Conversation -> ids and mask; ``template``, ``tokenizer``,
``pieces``) -> ``pipeline`` (length, checks, counts -> TokenSample; ``summary``) -> an extractor, or ``dryrun``.
Importing it brings neither transformers nor pyarrow.
"""

from __future__ import annotations

from hsformat.prepare.dryrun import DryRun, dry_run
from hsformat.prepare.pipeline import Preparation, prepare
from hsformat.prepare.rows import count_rows
from hsformat.prepare.summary import Summary
from hsformat.prepare.tokenizer import load_tokenizer

__all__ = ["DryRun", "Preparation", "Summary", "count_rows", "dry_run", "load_tokenizer", "prepare"]
