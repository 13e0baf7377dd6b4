"""Write demo_norms.json, the demo's statistics: python tests/data/make_demo_norms.py build/demo/data.hs.zarr ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hsformat as hs
from hsformat.store.local import LocalBackend
from hsformat.validate.segment import SegmentCheck


def main() -> None:
    store = hs.open(sys.argv[1])
    norms = [SegmentCheck(LocalBackend(sys.argv[1]), store.contract, c).norms()[0] for c in store.segments]
    data = {
        "captures": list(store.contract.keys),
        "states": [int(s) for n in norms for s in n.states],
        "mean_l2": [[round(float(x), 3) for x in row] for n in norms for row in n.mean_l2],
        "max_abs": [[float(x) for x in row] for n in norms for row in n.max_abs],
    }
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in data.items())
    Path(__file__).with_name("demo_norms.json").write_text(f"{{{rows}}}\n")


if __name__ == "__main__":
    main()
