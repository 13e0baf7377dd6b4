"""A segment while it is written: chunks go to the disk as they fill, the commit record last.

Memory does not grow with the segment: of states and token arrays there is a chunk each that is being filled, and those
that the threads of the ``encoder`` have in hand. What is one value a record waits in ``pending``.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.contract import Contract
from hsformat.digests import canonical_json, checksum
from hsformat.scan import store_states
from hsformat.store.array_json import ArraySpec
from hsformat.store.arrays import Dimensions, chunk_rows, encode_array, metadata, segment_groups
from hsformat.store.backend import Backend, Data
from hsformat.store.commit import FileEntry, commit_members, seal
from hsformat.store.encoder import Encoder, Lane
from hsformat.store.metadata import SEGMENTS, ensure_segments, group_json
from hsformat.store.pending import Pending, Row
from hsformat.store.shards import ShardWriter

__all__ = ["Building"]


class Building:
    """One segment that is being written. For one thread; OSError leaves it to be discarded.

    Parameters
    ----------
    pending
        The rows of the records that were added, kept by this class.
    """

    def __init__(
        self,
        backend: Backend,
        contract: Contract,
        pending: Pending,
        encoder: Encoder,
        *,
        writer: str,
        n: int,
        chunk_tokens: int | None,
    ) -> None:
        self._backend, self._contract, self._pending, self._encoder = backend, contract, pending, encoder
        self._writer, self._n, self._chunk_tokens = writer, n, chunk_tokens
        self.prefix = f"{SEGMENTS}/{writer}-{n}"
        self._lanes: dict[str, Lane] = {}
        self._files: dict[str, FileEntry] = {}

    def add(self, row: Row, hidden: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy a record's arrays, and hand over the chunks that are full.

        Raises
        ------
        OSError
            The segment cannot be written, or an earlier chunk of it could not.
        """
        if not self._lanes:
            ensure_segments(self._backend)
            self._open()
        for name, lane in self._lanes.items():
            if name.startswith("hidden/"):
                lane.extend(hidden[name.removeprefix("hidden/")], store_states)
            else:
                lane.extend(row.arrays.pop(name), _copy)
            if lane.shard.error is not None:
                raise lane.shard.error
        self._pending.add(row)

    def _open(self) -> None:
        for name, spec in self._specs(positions=False).items():
            if spec.sharded:
                self._lanes[name] = self._lane(spec)

    def _lane(self, spec: ArraySpec) -> Lane:
        sink = self._backend.create(f"{self.prefix}/{spec.name}/{spec.file}")
        shape = (chunk_rows(spec, self._contract.codec, self._chunk_tokens), *spec.shape[1:])
        return Lane(self._encoder, ShardWriter(sink, self._contract.codec), shape, spec.dtype)

    def _specs(self, *, positions: bool) -> dict[str, ArraySpec]:
        return self._pending.totals.specs(Dimensions.of(self._contract), positions=positions)

    def commit(self, producer: Mapping[str, Any] | None, *, replaces: Iterable[str] = ()) -> int:
        """Write what is left, make all of it durable and publish the commit record; return the segment's bytes.

        Raises
        ------
        OSError
            It is not known whether the segment is committed. FileNotFoundError: files of it were removed meanwhile, and
            it is not.
        """
        rows, pending, contract = list(self._pending.rows.values()), self._pending, self._contract
        specs = self._specs(positions=any(r.positions is not None for r in rows))
        if "position_ids" in specs:
            self._lanes["position_ids"] = self._lane(specs["position_ids"])
            self._lanes["position_ids"].extend(pending.join("position_ids"), _copy)
        for lane in self._lanes.values():
            lane.finish()
        self._encoder.wait()
        self._encoder.each(
            [
                *(partial(self._close, specs[name]) for name in self._lanes),
                *(partial(self._whole, spec) for spec in specs.values() if not spec.sharded),
                *(
                    partial(self._write, f"{group}/zarr.json", group_json())
                    for group in segment_groups(contract.fields)
                ),
            ]
        )
        distinct: dict[bytes, int] = {}
        index = [distinct.setdefault(canonical_json(r.provenance), len(distinct)) for r in rows]
        members = commit_members(
            writer=self._writer,
            n=self._n,
            ids=[r.id for r in rows],
            tokens=[r.tokens for r in rows],
            states=[r.states for r in rows],
            provenance=[rows[index.index(i)].provenance for i in range(len(distinct))],
            provenance_index=index,
            source_digests=[r.source_digest for r in rows],
            producer=producer,
            replaces=replaces,
            files=self._files,
        )
        record = group_json(seal(members))
        self._backend.settle(self.prefix)
        self._check_all_there()
        self._backend.publish(f"{self.prefix}/zarr.json", record)
        return sum(f.size for f in self._files.values())

    def _check_all_there(self) -> None:
        """Raise FileNotFoundError where files are gone or cut: to a garbage collector, a writer that pauses is dead."""
        found = {e.key.removeprefix(f"{self.prefix}/"): e.size for e in self._backend.listing(self.prefix)}
        if wrong := [key for key, entry in self._files.items() if found.get(key) != entry.size]:
            got = f"{len(wrong)} of {len(self._files)} files that were written are gone or cut, such as {wrong[0]}"
            raise FileNotFoundError(errno.ENOENT, f"{got}: removed by gc, as those of a writer that was killed?")

    def _close(self, spec: ArraySpec) -> None:
        size, sum_ = self._lanes[spec.name].shard.finish()
        self._files[f"{spec.name}/{spec.file}"] = FileEntry(size, sum_)
        rows = chunk_rows(spec, self._contract.codec, self._chunk_tokens)
        self._write(f"{spec.name}/zarr.json", metadata(spec, codec=self._contract.codec, chunk_rows=rows))

    def _whole(self, spec: ArraySpec) -> None:
        array = self._pending.join(spec.name)
        for key, data in encode_array(array, spec, codec=self._contract.codec, chunk_tokens=self._chunk_tokens):
            self._write(f"{spec.name}/{key}", data)

    def _write(self, key: str, data: Data) -> None:
        self._backend.write(f"{self.prefix}/{key}", data)
        self._files[key] = FileEntry(len(data), checksum(data))

    def abort(self) -> None:
        """Let go of all files; what is there of them is to be discarded."""
        self._encoder.wait()
        for lane in self._lanes.values():
            lane.shard.abort()


def _copy(out: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
    np.copyto(out, array)
