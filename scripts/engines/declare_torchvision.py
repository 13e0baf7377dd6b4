"""Let the published torchvision be imported beside a torch without CUDA.

    declare_torchvision.py TORCHVISION/__init__.py

Its compiled operators cannot be loaded there, and it then describes two of them that nobody has declared. They are
declared here; what calls one fails, which nothing in these environments does.
"""

from __future__ import annotations

import sys
from pathlib import Path

MARK = "# declared by hsformat's scripts/engines"
DECLARATION = f"""{MARK}
import torch as _torch

_declared = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(_torch.ops.torchvision, _name):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def main() -> None:
    """Put the declaration before the file's text, once."""
    path = Path(sys.argv[1])
    text = path.read_text("utf-8")
    if not text.startswith(MARK):
        path.write_text(DECLARATION + text, "utf-8")


if __name__ == "__main__":
    main()
