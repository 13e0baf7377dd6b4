"""CPU time of `import hsformat`, against an empty interpreter: python benchmarks/import_time.py [--runs 15] .

Interleaved runs in fresh processes; medians of CPU seconds (user + system) of the whole process, so that a busy machine
does not count. Also measured: the import with its most used names, which load NumPy and pydantic.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

CASES = {
    "empty interpreter": "pass",
    "import hsformat": "import hsformat",
    "import hsformat; hsformat.Record, .Contract": "import hsformat; hsformat.Record, hsformat.Contract",
    "import hsformat; hsformat.open (zarr)": "import hsformat; hsformat.open",
}


def cpu_seconds(code: str) -> float:
    """Return user + system seconds of a fresh interpreter that runs ``code``."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    for code in CASES.values():
        cpu_seconds(code)  # warm the page cache and the byte code
    figures: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(runs):
        for name, code in CASES.items():
            figures[name].append(cpu_seconds(code))
    base = statistics.median(figures["empty interpreter"])
    print(f"{'case':46}{'CPU s':>8}{'over empty':>12}")
    for name, values in figures.items():
        median = statistics.median(values)
        print(f"{name:46}{median:8.3f}{median - base:12.3f}")


if __name__ == "__main__":
    main()
