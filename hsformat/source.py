"""Where records come from when something is trained: a store, or whatever gives records as it does.

What reads records asks for these protocols and for no class, so that records that are made while the draft is trained
can take a store's place. This module may import ``contract`` and ``record``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.record import Record

__all__ = ["RecordSource", "SegmentedSource"]


class RecordSource(Protocol):
    """Records of one contract, found by number or id. What is read twice is the same; reading is safe in threads.

    One that is to be read by other processes can be pickled, and used after a fork.
    """

    @property
    def contract(self) -> Contract:
        """What holds for every record."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """The ids of all records, in order."""
        ...

    def __len__(self) -> int: ...

    def read(self, key: SupportsIndex | str, *, captures: Collection[str] | None = None) -> Record:
        """Return one record with these captures, in this order; None: all.

        Raises
        ------
        IndexError, KeyError
            There is no such record.
        HsError
            It cannot be had; the problems name it.
        """
        ...


@runtime_checkable
class SegmentedSource(Protocol):
    """What a source may tell beside, without reading records: how long they are, and which lie together."""

    def token_counts(self) -> npt.NDArray[np.int64]:
        """Return [R]: T of each record."""
        ...

    def state_counts(self) -> npt.NDArray[np.int64]:
        """Return [R]: S of each record, T or T - 1."""
        ...

    def segment_counts(self) -> npt.NDArray[np.int64]:
        """Return the number of records of each segment, in order; their sum is R."""
        ...
