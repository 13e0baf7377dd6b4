"""Records and token samples: one token sequence in memory, with and without its states.

Every array is indexed by token and unshifted: ``h[t]`` is the state after reading token t, ``loss_mask[t]``
says that the assistant produced token t. This module may import ``problems``, ``digests``, ``dtypes`` and ``models``;
what makes a record right or wrong is in ``checks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue

from hsformat.digests import Digest, digest_bytes
from hsformat.dtypes import as_array
from hsformat.models import Frozen
from hsformat.problems import InvalidRecord, problem

__all__ = ["Generation", "Provenance", "Record", "TokenSample"]


class Generation(Frozen):
    """How the supervised tokens came about.

    Attributes
    ----------
    mode
        ``none``: they were given. ``greedy``, ``sampled``: the target wrote them.
    max_new_tokens
        Limit given to the generation; None with mode ``none``.
    temperature, top_p, top_k, seed
        Of mode ``sampled``; None otherwise, or where not used.
    """

    mode: Literal["none", "greedy", "sampled"]
    max_new_tokens: Annotated[int, Field(gt=0)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None


GIVEN = Generation(mode="none")


class Provenance(Frozen):
    """Where one record comes from: recorded, reported when mixed, never compared silently.

    Attributes
    ----------
    generation
        Who wrote the supervised tokens, and how.
    template_digest
        SHA-256 of the chat template's text; None: no template was used (ids were given).
    template_kwargs
        Keyword arguments that the template was rendered with.
    """

    generation: Generation = GIVEN
    template_digest: Digest | None = None
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSample:
    """What preparation hands to an extractor: ids and mask of one sequence.

    Attributes
    ----------
    id
        Unique among the samples.
    input_ids
        [T] integers.
    loss_mask
        [T], 1 where the assistant produced the token. All 0 where the target is to write the answer.
    provenance
        ``generation.mode`` is ``none`` here; an extractor that generates replaces it.
    source_digest
        Digest of ids and mask, to tell on resume that a record came from this very sample.
    """

    id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    provenance: Provenance = field(default_factory=Provenance)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def source_digest(self) -> str:
        """Digest over length, ids (int32) and mask (uint8), little-endian."""
        ids = np.ascontiguousarray(self.input_ids, dtype="<i4")
        mask = np.ascontiguousarray(self.loss_mask, dtype=np.uint8)
        return digest_bytes((len(ids).to_bytes(8, "little"), ids.tobytes(), mask.tobytes()))


class Record:
    """One token sequence and one array of states per capture.

    Parameters
    ----------
    id
        Unique in its store; not empty, at most 1,024 bytes as UTF-8.
    input_ids
        [T] integers: NumPy, torch or a list.
    loss_mask
        [T], 0 or 1: 1 where the assistant produced the token, its end-of-turn token included.
    hidden
        Capture key to [S, H] floats. S = T, or T - 1 for a generated record, whose last token is never run
        forward.
    position_ids
        [T] integers; None: 0..T-1.
    fields
        Declared extra arrays: [T, *shape] on the token axis, [*shape] on the record axis.
    provenance
        Who wrote the supervised tokens, and the template; the default says: given, no template.
    source_digest
        Digest of the sample that the record was made from (:attr:`TokenSample.source_digest`).

    Raises
    ------
    InvalidRecord
        HS104, HS105, HS106, HS109 or HS207: something is not an array of numbers at all. Everything else is found by
        :func:`hsformat.checks.check_record`, which ``Writer.append`` calls.

    Notes
    -----
    Arrays are taken as they are, without a copy where possible; a record does not own them.
    """

    __slots__ = (
        "fields",
        "hidden",
        "id",
        "input_ids",
        "loss_mask",
        "position_ids",
        "provenance",
        "source_digest",
    )

    def __init__(
        self,
        *,
        id: str,
        input_ids: Any,
        loss_mask: Any,
        hidden: Mapping[str, Any],
        position_ids: Any = None,
        fields: Mapping[str, Any] | None = None,
        provenance: Provenance | None = None,
        source_digest: str | None = None,
    ) -> None:
        self.id = id
        self.input_ids = _array(input_ids, "HS105", id, "input_ids")
        self.loss_mask = _array(loss_mask, "HS104", id, "loss_mask")
        self.hidden = {k: _array(v, "HS207", id, f"hidden[{k!r}]") for k, v in hidden.items()}
        self.position_ids = None if position_ids is None else _array(position_ids, "HS106", id, "position_ids")
        self.fields = {k: _array(v, "HS109", id, f"fields[{k!r}]") for k, v in (fields or {}).items()}
        self.provenance = provenance if provenance is not None else Provenance()
        self.source_digest = source_digest

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids.shape[0]) if self.input_ids.ndim else 0

    @property
    def num_states(self) -> int:
        """S: rows of each capture; 0 without captures."""
        return next((int(h.shape[0]) for h in self.hidden.values() if h.ndim), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self.input_ids, self.loss_mask, *self.hidden.values(), *self.fields.values()]
        if self.position_ids is not None:
            arrays.append(self.position_ids)
        return sum(a.nbytes for a in arrays)

    def __repr__(self) -> str:
        shape = f"tokens={self.num_tokens}, states={self.num_states}"
        return f"Record(id={self.id!r}, {shape}, captures={list(self.hidden)})"


def _array(value: Any, code: str, record_id: str, name: str) -> npt.NDArray[Any]:
    try:
        return as_array(value)
    except TypeError as e:
        raise InvalidRecord(
            problem(
                code,
                where=f"record {record_id!r}: {name}",
                got=str(e),
                expected="an array of numbers",
                fix="give a NumPy array, a torch tensor or a list of numbers",
                record=str(record_id),
            )
        ) from e
