"""Records for the tests of hsformat.torch, and sources that are no stores."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.torch import pack

pytestmark = pytest.mark.needs("torch")  # nothing imports this module without it

CONTRACT = tiny_contract()
LENGTHS = [3 + 5 * i % 11 for i in range(30)]
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=t, seed=i) for i, t in enumerate(LENGTHS)]


class Memory:
    """Records in memory: a source that tells no more than it must."""

    def __init__(self, records, contract=CONTRACT):
        self.contract, self.records = contract, records
        self.ids = [r.id for r in records]

    def __len__(self):
        return len(self.records)

    def read(self, key, *, captures=None):
        return self.records[key]


class Live(Memory):
    """Counts bytes of records and batches that somebody holds."""

    def __init__(self, records):
        super().__init__(records)
        self.lock, self.live, self.peak, self.reads = threading.Lock(), 0, 0, 0

    def hold(self, thing, nbytes):
        with self.lock:
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        weakref.finalize(thing, self.release, nbytes)

    def release(self, nbytes):
        with self.lock:
            self.live -= nbytes

    def read(self, key, *, captures=None):
        self.reads += 1
        record = self.records[key]
        copies = {k: h.copy() for k, h in record.hidden.items()}
        for h in copies.values():
            self.hold(h, h.nbytes)
        return hs.Record(id=record.id, input_ids=record.input_ids, loss_mask=record.loss_mask, hidden=copies)

    def collate(self, records):
        packed = pack(records)
        for h in packed.hidden.values():
            self.hold(h, h.nbytes)
        return packed

    def token_counts(self):
        return np.array([r.num_tokens for r in self.records])

    state_counts = token_counts

    def segment_counts(self):
        return np.array([len(self.records)])
