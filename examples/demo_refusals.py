"""Two faults that cost people days, refused: python examples/demo_refusals.py build/demo/data.hs.zarr .

1. A head trained on [d2, d15, d27] and served [d0, d2, d15]: all shapes fit, and it drafts garbage.
2. A record of 4,095 states with a loss mask of 5,147 entries: nobody had checked.

Exits 0 if both are refused with the right code, 1 otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import hsformat as hs


def refuse_layout(path: Path) -> list[hs.Problem]:
    """Open the store for a draft that is fed other layers than the data was extracted for."""
    try:
        hs.open(path, expect=hs.Layout(aux=("d0", "d2", "d15"), last="d30"))
    except hs.ContractMismatch as e:
        return e.problems
    return []


def refuse_record(contract: hs.Contract) -> list[hs.Problem]:
    """Append a record whose mask is longer than its states."""
    rng = np.random.default_rng(0)
    tokens, mask_length = 4095, 5147
    states = rng.standard_normal((tokens, contract.target.hidden_size), dtype=np.float32)
    record = hs.Record(
        id="seed-004",
        input_ids=rng.integers(0, contract.target.vocab_size, tokens),
        loss_mask=np.ones(mask_length, np.uint8),
        hidden=dict.fromkeys(contract.keys, states),
    )
    with tempfile.TemporaryDirectory() as folder, hs.create(Path(folder) / "other.hs.zarr", contract) as writer:
        try:
            writer.append(record)
        except hs.InvalidRecord as e:
            return e.problems
    return []


def main() -> int:
    """Show both refusals."""
    path = Path(sys.argv[1])
    contract = hs.open(path).contract
    print(f"\n1. {path} holds {list(contract.layout.aux)}; a draft that is fed ['d0', 'd2', 'd15'] is refused:\n")
    layout_problems = refuse_layout(path)
    print(*layout_problems, sep="\n")
    print("\n2. A record of 4,095 states with a mask of 5,147 is refused:\n")
    record_problems = refuse_record(contract)
    print(*record_problems, sep="\n")
    refused = [p.code for p in layout_problems][:1] == ["HS401"] and [p.code for p in record_problems] == ["HS101"]
    print("\nBoth refused." if refused else "\nNOT REFUSED: this is a defect of hsformat.")
    return 0 if refused else 1


if __name__ == "__main__":
    sys.exit(main())
