"""A map-style dataset over any source of records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from hsformat.dtypes import numpy_dtype
from hsformat.problems import ContractMismatch, StoreError, problem
from hsformat.source import RecordSource, SegmentedSource
from hsformat.torch.tensors import TensorRecord, tensor_record

__all__ = ["RecordDataset"]


class RecordDataset(Dataset[TensorRecord]):
    """Records of a source as tensors, by number.

    It may be given to ``torch.utils.data.DataLoader`` with workers that are forked or spawned, and read in threads:
    each process opens files of its own or reads shared ones without a position.

    Parameters
    ----------
    source
        A store, or another :class:`~hsformat.source.RecordSource`.
    captures
        Keys of the captures to read, in this order; None: all. Others are not read at all.
    ids
        The records, in this order; None: all.

    Attributes
    ----------
    source, captures
        As given.

    Raises
    ------
    ContractMismatch
        HS109: the source has no such capture.
    StoreError
        HS107: two records have one of the ``ids``.
    KeyError, ValueError
        An id that there is not, or that is given twice.
    TypeError
        ``captures`` or ``ids`` is text.
    """

    def __init__(
        self, source: RecordSource, *, captures: Collection[str] | None = None, ids: Sequence[str] | None = None
    ) -> None:
        for name, value in (("captures", captures), ("ids", ids)):
            if isinstance(value, str):
                raise TypeError(f"{name} is a collection, [{value!r}], not text")
        keys = source.contract.keys
        self.source = source
        self.captures = keys if captures is None else tuple(captures)
        if absent := [k for k in self.captures if k not in keys]:
            where, got = "RecordDataset: captures", f"captures {list(keys)}"
            raise ContractMismatch([problem("HS109", where=where, got=got, expected=f"{k} among them") for k in absent])
        self._rows = np.arange(len(source), dtype=np.int64) if ids is None else _rows(source, ids)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TensorRecord:
        """Return one record.

        Raises
        ------
        IndexError
            There is none of this number.
        HsError
            As ``source.read``; or InvalidRecord, if what was read breaks the contract.
        """
        record = self.source.read(int(self._rows[index]), captures=self.captures)
        return tensor_record(record, self.source.contract, self.captures)

    @property
    def ids(self) -> list[str]:
        """The ids of the records, in order."""
        return [self.id_of(index) for index in range(len(self))]

    def id_of(self, index: int) -> str:
        """Return the id of a record."""
        return self.source.ids[int(self._rows[index])]

    def token_counts(self) -> npt.NDArray[np.int64] | None:
        """Return [R]: T of each record; None if the source does not tell."""
        return self.source.token_counts()[self._rows] if isinstance(self.source, SegmentedSource) else None

    def segments(self) -> npt.NDArray[np.int64] | None:
        """Return [R]: the number of each record's segment; None if the source does not tell."""
        if not isinstance(self.source, SegmentedSource):
            return None
        counts = self.source.segment_counts()
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)[self._rows]

    def nbytes(self) -> npt.NDArray[np.int64] | None:
        """Return [R]: bytes of the tensors of each record; None if the source does not tell."""
        if not isinstance(self.source, SegmentedSource):
            return None
        contract = self.source.contract
        width = contract.target.hidden_size
        states = sum(numpy_dtype(c.dtype).itemsize * width for c in contract.captures if c.key in self.captures)
        tokens, fixed = 8 + 8 + 1, 0
        for f in contract.fields:
            size = int(np.prod(f.shape, dtype=np.int64)) * numpy_dtype(f.dtype).itemsize
            tokens, fixed = (tokens + size, fixed) if f.axis == "token" else (tokens, fixed + size)
        return (self.source.state_counts() * states + self.source.token_counts() * tokens + fixed)[self._rows]


def _rows(source: RecordSource, ids: Sequence[str]) -> npt.NDArray[np.int64]:
    numbers = {record_id: row for row, record_id in enumerate(source.ids)}
    if absent := [i for i in ids if i not in numbers]:
        raise KeyError(f"{len(absent)} of {len(ids)} ids are not in the source, {absent[0]!r} the first")
    if twice := [i for i, n in Counter(ids).items() if n > 1]:
        raise ValueError(f"{len(twice)} ids are given twice, {twice[0]!r} the first")
    if len(numbers) < len(source):
        wanted = set(ids)
        ambiguous = sorted(i for i, n in Counter(source.ids).items() if n > 1 and i in wanted)
        if ambiguous:
            expected, fix = "one record of this id", "leave the id out, or repair the source"
            raise StoreError(
                [
                    problem("HS107", where=f"record {i!r}", got="two records", expected=expected, fix=fix, record=i)
                    for i in ambiguous
                ]
            )
    return np.array([numbers[i] for i in ids], np.int64)
