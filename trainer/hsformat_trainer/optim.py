"""Optimizers of a draft: AdamW for all, or Muon for the matrices inside and AdamW for the rest.

Muon makes updates orthogonal, which means something for a matrix that maps states to states: ``fc`` and those of the
decoder layers. An embedding or a head is a row a token, and a norm is a vector; these stay with AdamW, as the
description of ``torch.optim.Muon`` asks. Muon's learning rate is of another size: its update is scaled by
sqrt(max(1, rows / columns)) alone (torch's ``original``); rates around ten times AdamW's are usual
(vllm-project/speculators#746).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hsformat_trainer.config import TrainConfig

__all__ = ["build_optimizers", "takes_muon"]

EPS = 1e-8
"""AdamW's; torch's own default, written down since a checkpoint is resumed with it."""

MUON_MOMENTUM = 0.95
"""With Nesterov's step; torch's own defaults."""


def takes_muon(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon updates a parameter, by its serving name: a matrix of ``fc`` or of a decoder layer."""
    return parameter.ndim == 2 and (name.startswith(("fc.", "layers.")))


def build_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name; together they hold every parameter that is trained, once.

    Parameters
    ----------
    parameters
        Names, as they are served, and parameters. Those that need no gradient are left out.

    Returns
    -------
    ``adamw``, and with ``optimizer: muon`` also ``muon``. Vectors (norms, biases) do not decay.
    """
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    muon = [(name, p) for name, p in trained if config.optimizer == "muon" and takes_muon(name, p)]
    names = {name for name, _ in muon}
    rest = [(name, p) for name, p in trained if name not in names]
    groups = [
        {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    out: dict[str, torch.optim.Optimizer] = {}
    if groups := [g for g in groups if g["params"]]:
        out["adamw"] = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=EPS)
    if muon:
        out["muon"] = torch.optim.Muon(
            [p for _, p in muon],
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            momentum=MUON_MOMENTUM,
            nesterov=True,
            adjust_lr_fn="original",
        )
    return out
