"""``python -m hsformat_trainer ...`` is ``hsformat train ...``: for ``accelerate launch -m`` and ``torchrun -m``."""

from __future__ import annotations

import sys

from hsformat.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
