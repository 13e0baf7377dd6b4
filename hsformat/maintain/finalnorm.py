"""The last capture taken through the target's final norm: from ``none`` to ``final``, and never back.

A norm cannot be undone: it forgets the length of each state. The way there is computed in float32 with the target's own
weights and rounded once, to the capture's dtype.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsformat.checks import check_record
from hsformat.contract import Capture, Contract, FinalNorm
from hsformat.dtypes import to_float32
from hsformat.layout import capture_key
from hsformat.problems import ContractMismatch, Problem, Severity, StoreError, problem
from hsformat.record import Record
from hsformat.scan import CaptureStats, StateScan, to_stored
from hsformat.store.backend import Source
from hsformat.store.commit import CommitRecord
from hsformat.store.segment import SegmentReader
from hsformat.store.verify import file_problems
from hsformat.target.jsonfiles import require_folder
from hsformat.target.keytensors import basis_digest, key_tensors, load_key_tensor

__all__ = ["FinalNormWeights", "converted_records", "load_final_norm", "normed_contract"]


@dataclass(frozen=True, kw_only=True)
class FinalNormWeights:
    """A target's final norm: ``weight_H`` as it multiplies (an offset of 1 is in it), ``bias_H`` or None, float32."""

    norm: FinalNorm
    weight_H: npt.NDArray[np.float32]
    bias_H: npt.NDArray[np.float32] | None

    def apply(self, states_SH: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return [S, H] states after the norm, in float32."""
        x_SH = states_SH
        if self.norm.kind == "layernorm":
            x_SH = x_SH - x_SH.mean(axis=1, keepdims=True, dtype=np.float32)
        variance_S1 = np.square(x_SH).mean(axis=1, keepdims=True, dtype=np.float32)
        out_SH: npt.NDArray[np.float32] = x_SH / np.sqrt(variance_S1 + np.float32(self.norm.eps)) * self.weight_H
        return out_SH if self.bias_H is None else out_SH + self.bias_H


def load_final_norm(contract: Contract, folder: str | os.PathLike[str], *, where: str) -> FinalNormWeights:
    """Read the weights of the final norm of the target that a contract is about.

    Raises
    ------
    ContractMismatch
        HS301: the folder's embedding, final norm or head are not those of the contract's target.
    ForeignFileError
        HS411, HS601, HS602, HS603: the folder cannot be read as a model.
    """
    path = Path(folder)
    require_folder(path)
    found, _ = basis_digest(key_tensors(path))
    if found != (expected := contract.target.basis_digest):
        raise ContractMismatch(
            [
                problem(
                    "HS301",
                    where=f"{where}: target.basis_digest",
                    got=expected,
                    expected=f"{found}, that of {path}",
                    fix="give the folder of the model that the states were taken from",
                )
            ]
        )
    weight, bias = load_key_tensor(path, "final_norm"), load_key_tensor(path, "final_norm_bias")
    hidden = contract.target.hidden_size
    if weight is None or weight.shape != (hidden,) or (bias is not None and bias.shape != (hidden,)):
        got = "no weight" if weight is None else f"{list(weight.shape)}"
        raise ContractMismatch([problem("HS409", where=f"{path}: final norm", got=got, expected=f"[{hidden}]")])
    weight_H = to_float32(weight) + np.float32(1) if contract.target.final_norm.unit_offset else to_float32(weight)
    return FinalNormWeights(
        norm=contract.target.final_norm, weight_H=weight_H, bias_H=None if bias is None else to_float32(bias)
    )


def normed_contract(contract: Contract) -> Contract | None:
    """Return the contract of the same data with its capture of depth N after the final norm; None: it has none before.

    Raises
    ------
    ContractMismatch
        HS405: the capture is an aux capture of the layout, or it is stored both before and after the norm.
    """
    n = contract.target.num_layers
    before, after = capture_key(n, normed=False), capture_key(n, normed=True)
    if before not in contract.keys:
        return None
    both = after in contract.keys
    if both or before in contract.layout.aux:
        got = f"both {before} and {after}" if both else f"{before} among the aux captures {list(contract.layout.aux)}"
        expected = f"{before} as the last capture alone"
        fix = "leave the final norm out: what a draft is fed would change"
        raise ContractMismatch([problem("HS405", where="captures", got=got, expected=expected, fix=fix)])
    data = contract.to_json()
    for capture in data["captures"]:
        capture["norm"] = "final" if capture["depth"] == n else capture["norm"]
    if data["layout"]["last"] == before:
        data["layout"]["last"] = after
    return Contract.model_validate(data)


def converted_records(
    source: Source, contract: Contract, commit: CommitRecord, wanted: Contract, norm: FinalNormWeights
) -> Iterator[tuple[Record, dict[str, CaptureStats]]]:
    """Yield the records of a segment with their last capture after the norm.

    Parameters
    ----------
    contract
        Of the segment's store.
    wanted
        :func:`normed_contract` of it, perhaps with fewer fields.

    Raises
    ------
    StoreError
        The segment is damaged, or a state after the norm does not fit its dtype (HS207).
    """
    if damaged := list(file_problems(source, commit, content=True)):
        raise StoreError(damaged)
    data = contract.to_json()
    data["fields"] = wanted.to_json()["fields"]
    reader = SegmentReader(source, Contract.model_validate(data), commit)
    n = contract.target.num_layers
    before, capture = capture_key(n, normed=False), wanted.capture(capture_key(n, normed=True))
    for row in range(commit.records):
        record = reader.record(row, contract.keys)
        normed_SH = norm.apply(to_float32(record.hidden.pop(before)))
        stored, found = _store(capture, record.id, normed_SH)
        record.hidden[capture.key] = stored
        problems, stats = check_record(wanted, record)
        if errors := [p for p in (found or problems) if p.severity is Severity.ERROR]:
            raise StoreError([p.at(f"{source.location}/{commit.prefix}") for p in errors])
        for key in set(contract.keys) - {before}:  # as they were written
            mean, most = reader.rows(f"stats/{key}", slice(row, row + 1))[0].tolist()
            stats[key] = CaptureStats(mean_l2=mean, max_abs=most)
        yield record, stats


def _store(
    capture: Capture, record_id: str, states_SH: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[Any], list[Problem]]:
    """Return states in the capture's dtype, and what is wrong with them before (values that do not fit it)."""
    scan = StateScan(capture, record_id, norms=False)
    scan.add(states_SH)
    return to_stored(capture, states_SH), [p for p in scan.problems() if p.severity is Severity.ERROR]
