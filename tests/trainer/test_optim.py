"""Optimizers and schedules: every parameter once, Muon's where it means something, rates without a lost step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hsformat_trainer.config import TrainConfig
from hsformat_trainer.optim import build_optimizers
from hsformat_trainer.schedule import Schedules, warmup_steps

pytestmark = pytest.mark.needs("torch")

SHAPES = {
    "fc.weight": (4, 12),
    "norm.weight": (4,),
    "lm_head.weight": (9, 4),
    "embed_tokens.weight": (9, 4),
    "layers.0.self_attn.q_proj.weight": (4, 8),
    "layers.0.self_attn.q_proj.bias": (4,),
    "layers.0.mlp.up_proj.weight": (6, 4),
}


def config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {"stores": ["s"], "target": "t", "serve": ["vllm@0.32.0"], "out": "o", "weight_decay": 0.5, **changes}
    )


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def held(optimizer: torch.optim.Optimizer, given: dict[str, nn.Parameter]) -> dict[str, float]:
    """Return the weight decay of each parameter, by name."""
    names = {id(p): name for name, p in given.items()}
    return {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}


def test_muon_takes_the_matrices_inside_and_adamw_the_rest() -> None:
    given = parameters()
    given["embed_tokens.weight"].requires_grad_(False)
    built = build_optimizers(given.items(), config(optimizer="muon"))
    assert isinstance(built["muon"], torch.optim.Muon)
    assert held(built["muon"], given) == {
        "fc.weight": 0.5,
        "layers.0.self_attn.q_proj.weight": 0.5,
        "layers.0.mlp.up_proj.weight": 0.5,
    }
    assert held(built["adamw"], given) == {
        "lm_head.weight": 0.5,
        "norm.weight": 0.0,
        "layers.0.self_attn.q_proj.bias": 0.0,
    }
    assert {g["lr"] for g in built["muon"].param_groups} == {config().muon_lr}


def test_adamw_alone_has_them_all() -> None:
    given = parameters()
    (built,) = build_optimizers(given.items(), config()).values()
    assert held(built, given).keys() == given.keys()
    assert {(g["lr"], g["betas"]) for g in built.param_groups} == {(config().lr, (0.9, 0.95))}


def rates(kind: str, warmup: float, total: int, lr: float = 2.0) -> list[float]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr)
    schedules = Schedules({"adamw": optimizer}, kind=kind, warmup=warmup, total=total)  # type: ignore[arg-type] # text
    out = []
    for _ in range(total):
        assert optimizer.param_groups[0]["lr"] == schedules.rates()["adamw"]
        out.append(schedules.rates()["adamw"])
        optimizer.step()
        schedules.step()
    return out


def test_every_step_is_made_at_a_rate() -> None:
    for kind in ("cosine", "linear", "constant"):
        got = rates(kind, 0.2, 10)
        assert min(got) > 0
        assert got[:2] == [1.0, 2.0]
        assert max(got) == 2.0
    assert rates("constant", 0.0, 3) == [2.0] * 3
    assert rates("linear", 0.0, 4) == pytest.approx([1.6, 1.2, 0.8, 0.4])
    cosine = [1 + math.cos(math.pi * i / 5) for i in range(1, 5)]
    assert rates("cosine", 0.0, 4) == pytest.approx(cosine)


def test_the_warm_up_is_a_share_rounded_up() -> None:
    assert [warmup_steps(s, 10) for s in (0.0, 0.01, 0.1, 0.11)] == [0, 1, 1, 2]


def test_a_schedule_goes_on_where_it_was() -> None:
    def make() -> tuple[torch.optim.Optimizer, Schedules]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.3)
        return optimizer, Schedules({"adamw": optimizer}, kind="cosine", warmup=0.1, total=20)

    (_, first), (optimizer, second) = make(), make()
    for _ in range(7):
        first.step()
    second.go_to(7)
    assert second.rates() == first.rates() == {"adamw": optimizer.param_groups[0]["lr"]}
    first.step()
    second.step()
    assert second.rates() == first.rates() == {"adamw": optimizer.param_groups[0]["lr"]}


def test_a_rate_that_is_changed_on_resume_counts() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedules = Schedules({"adamw": optimizer}, kind="linear", warmup=0.0, total=9)
    schedules.go_to(4)
    assert schedules.rates() == {"adamw": 0.25} == {"adamw": optimizer.param_groups[0]["lr"]}
