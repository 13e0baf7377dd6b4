"""What a training run is asked to do: every option, its meaning and its default, and no other place has defaults.

A run is described by a YAML file (``--config``), by flags that override it, or by both; :mod:`.configuration` reads
them. ``--print-config`` prints the whole of it. Importing this module brings no torch.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from hsformat.align import MaskRule
from hsformat.layout import CaptureKey
from hsformat.models import FromList, Frozen

__all__ = ["HeldOut", "LossName", "MaskRule", "Precision", "ScheduleName", "StoreWeight", "TrackerName", "TrainConfig"]

LossName = Literal["kl", "ce", "reverse_kl", "lk"]
OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "linear", "constant"]
Precision = Literal["bf16", "fp32"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]

Count = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]  # no path of the system holds a zero byte


def _store(value: Any) -> Any:
    """Return ``PATH`` as a store of weight 1."""
    return {"path": value} if isinstance(value, str) else value


def _held_out(value: Any) -> Any:
    """Return ``0.05``, ``ids:FILE``, ``store:PATH`` or ``none`` as its fields.

    Raises
    ------
    ValueError
        It is none of them.
    """
    if isinstance(value, (dict, HeldOut)):
        return value
    text = str(value)
    if text == "none":
        return {"share": 0.0}
    kind, colon, rest = text.partition(":")
    if colon and kind in ("ids", "store"):
        return {"share": None, kind: rest}
    try:
        share = float(text)
    except ValueError as e:
        raise ValueError("a share of the records (0.05), ids:FILE, store:PATH, or none") from e
    return {"share": share}


def _parts(value: Any) -> Any:
    """Return ``a,b`` as a list, as a flag gives it; in a file a single value may stand for a list of one."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _one_or_more(value: Any) -> Any:
    """Return one store as a list; its path may have commas."""
    return [value] if isinstance(value, (str, dict, StoreWeight)) else value


PartsFrom = BeforeValidator(_parts)
"""Annotation of a tuple field that a text with commas may be given for."""


def _clip(value: Any) -> Any:
    """Return what YAML calls null for its words, which a flag has."""
    return None if value in ("null", "none") else value


def _place(path: str) -> str:
    """Return a path by which a store is found to be named twice: ``X`` and ``X/`` are one."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


class StoreWeight(Frozen):
    """One store that is trained on."""

    path: Annotated[Text, Field(description="Path or address of a store.")]
    weight: Annotated[
        float,
        Field(
            gt=0,
            le=1000,
            description="How often its records come an epoch: 2 is twice, 0.5 is half of them, other ones each epoch.",
        ),
    ] = 1.0


class HeldOut(Frozen):
    """Which records are kept out of training, to evaluate on; exactly one of the three."""

    share: Annotated[
        Share | None,
        Field(
            description="Share of the records, chosen by a hash of id and seed, so that a record stays where it is "
            "when stores grow; 0: none."
        ),
    ] = 0.05
    ids: Annotated[Text | None, Field(description="File of record ids, one a line.")] = None
    store: Annotated[Text | None, Field(description="Store of which all records are held out.")] = None

    @model_validator(mode="before")
    @classmethod
    def _one_given(cls, value: Any) -> Any:
        """Let ``ids`` or ``store`` alone stand for it: the default share then does not hold."""
        if isinstance(value, dict) and "share" not in value and (value.get("ids") or value.get("store")):
            return {**value, "share": None}
        return value

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(v is not None for v in (self.share, self.ids, self.store)) != 1:
            raise ValueError("give one of share, ids and store")
        return self


class TrainConfig(Frozen):
    """All options of a run. A field's description is the help of its flag."""

    # data
    stores: Annotated[
        tuple[Annotated[StoreWeight, BeforeValidator(_store)], ...],
        Field(min_length=1, description="Stores that are trained on, of one compatibility digest."),
        FromList,
        BeforeValidator(_one_or_more),
    ]
    held_out: Annotated[
        HeldOut,
        BeforeValidator(_held_out),
        Field(
            description="Records to evaluate on: a share of them (0.05), ids:FILE (an id a line), store:PATH, or none."
        ),
    ] = HeldOut()
    aux: Annotated[
        Annotated[tuple[CaptureKey, ...], Field(min_length=1), FromList, PartsFrom] | None,
        Field(description="Captures that fc concatenates, in order (d2,d15,d27); without: the contract's layout."),
    ] = None
    last: Annotated[
        CaptureKey | None,
        Field(description="Capture that gives the target distribution (d30); without: the contract's layout."),
    ] = None

    # what it is for
    target: Annotated[Text, Field(description="Folder of the target model.")]
    serve: Annotated[
        tuple[Text, ...],
        Field(min_length=1, description="Engines that will serve the draft: sglang@0.5.23,vllm@0.32.0 or custom:FILE."),
        FromList,
        PartsFrom,
    ]
    engine_profile: Annotated[
        Text | None, Field(description="Profile that `hsformat engines probe` wrote, for a version it proved.")
    ] = None
    out: Annotated[Text, Field(description="Folder of checkpoints, logs and the report.")]

    # the draft
    init: Annotated[Text | None, Field(description="Folder of a draft whose weights training begins with.")] = None
    draft_config: Annotated[
        Text | None, Field(description="A draft's config.json that states its sizes and options, as it will be served.")
    ] = None
    draft_layers: Annotated[Count, Field(description="Decoder layers of the draft.")] = 1
    draft_hidden_size: Annotated[Count | None, Field(description="Width of the draft; without: the target's.")] = None
    draft_intermediate_size: Annotated[
        Count | None, Field(description="Width of the draft's MLP; without: the target's.")
    ] = None
    draft_heads: Annotated[Count | None, Field(description="Attention heads; without: the target's.")] = None
    draft_kv_heads: Annotated[Count | None, Field(description="Key and value heads; without: the target's.")] = None
    draft_head_dim: Annotated[Count | None, Field(description="Width of a head; without: the target's.")] = None
    draft_rope: Annotated[
        dict[str, JsonValue] | None,
        Field(description="Rotary embedding, as Transformers' rope_parameters; without: the target's."),
    ] = None
    draft_max_positions: Annotated[
        Count | None, Field(description="max_position_embeddings of the draft; without: the target's.")
    ] = None
    draft_vocab_size: Annotated[
        Count | None,
        Field(
            description="Target ids that the draft can propose, the most frequent supervised ones; without: all. 32000 "
            "is usual for large vocabularies, and trains and drafts faster."
        ),
    ] = None
    norm_before_residual: Annotated[
        bool, Field(description="The residual is the normed output of fc (vLLM alone has it).")
    ] = False
    norm_before_fc: Annotated[bool, Field(description="One RMSNorm over the concatenated captures.")] = False
    fc_norm: Annotated[bool, Field(description="One RMSNorm a capture.")] = False
    norm_output: Annotated[bool, Field(description="A step hands its output on after the final norm.")] = False
    train_embedding: Annotated[
        bool, Field(description="Train an embedding of the draft's own; else the target's is used, frozen.")
    ] = False
    train_head: Annotated[
        bool, Field(description="Train the draft's head; else it keeps the target's rows, frozen.")
    ] = True

    # the objective
    steps: Annotated[int, Field(gt=0, le=64, description="K, the steps of training-time test.")] = 7
    decay: Annotated[float, Field(gt=0, le=1, description="Weight of step k: decay to the power of k.")] = 0.8
    loss: Annotated[
        LossName,
        Field(
            description="kl (soft cross-entropy with the target's distribution), ce (with its argmax), reverse_kl, or "
            "lk (kl and total variation)."
        ),
    ] = "kl"
    mask_rule: Annotated[
        MaskRule, Field(description="Which positions carry loss (hsformat.align); serving: what an engine drafts.")
    ] = "serving"

    # the run
    epochs: Annotated[int, Field(gt=0, le=10_000, description="Passes over the records.")] = 1
    max_steps: Annotated[Count | None, Field(description="End after so many optimizer steps; without: epochs.")] = None
    batch_tokens: Annotated[
        Count, Field(description="Most tokens of a batch (of one process, before accumulation); packed, not padded.")
    ] = 4096
    accumulation: Annotated[Count, Field(description="Batches of an optimizer step, in each process.")] = 1
    optimizer: Annotated[
        OptimizerName, Field(description="muon takes matrices of the decoder layers and fc, AdamW all the rest.")
    ] = "adamw"
    lr: Annotated[Positive, Field(description="Highest learning rate (AdamW).")] = 1e-4
    muon_lr: Annotated[Positive, Field(description="Highest learning rate of Muon's matrices.")] = 2e-3
    weight_decay: Annotated[float, Field(ge=0, description="Decoupled weight decay of matrices.")] = 0.0
    beta1: Annotated[Share, Field(description="AdamW.")] = 0.9
    beta2: Annotated[Share, Field(description="AdamW.")] = 0.95
    schedule: Annotated[ScheduleName, Field(description="Course of the learning rate after the warm-up.")] = "cosine"
    warmup: Annotated[Share, Field(description="Share of the optimizer steps in which the rate rises from 0.")] = 0.02
    clip: Annotated[
        Positive | None, BeforeValidator(_clip), Field(description="Largest norm of the gradient; null: not clipped.")
    ] = 1.0
    precision: Annotated[
        Precision, Field(description="bf16: products in bfloat16, weights and optimizer in float32.")
    ] = "bf16"
    device: Annotated[Text, Field(description="auto (a GPU where there is one), cpu, cuda, ...")] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**53, description="Of weights, order and held-out records.")] = 0
    workers: Annotated[int, Field(ge=0, le=256, description="Threads that read ahead; 0: none.")] = 2

    # what is written
    save_every: Annotated[Natural, Field(description="Optimizer steps between checkpoints; 0: at the end alone.")] = 500
    keep: Annotated[Count, Field(description="Newest checkpoints that stay.")] = 2
    eval_every: Annotated[Natural, Field(description="Optimizer steps between evaluations; 0: at the end alone.")] = 500
    eval_records: Annotated[
        Count | None, Field(description="Most held-out records of an evaluation before the last; without: all.")
    ] = 256
    log_every: Annotated[Count, Field(description="Optimizer steps between lines of the log.")] = 10
    trackers: Annotated[
        tuple[TrackerName, ...],
        Field(description="tensorboard, wandb, mlflow, trackio: through accelerate; each must be installed."),
        FromList,
        PartsFrom,
    ] = ()
    project: Annotated[Text, Field(description="Name of the project in trackers.")] = "hsformat"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.init is not None and self.draft_config is not None:
            raise ValueError("init and draft_config both state what the draft is: give one")
        return self

    @field_validator("stores")
    @classmethod
    def _stores_once(cls, stores: tuple[StoreWeight, ...]) -> tuple[StoreWeight, ...]:
        if len({_place(s.path) for s in stores}) != len(stores):
            raise ValueError("each store once: give it a weight instead")
        return stores

    @field_validator("aux")
    @classmethod
    def _captures_once(cls, aux: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if aux is not None and len(set(aux)) != len(aux):
            raise ValueError("each capture once")
        return aux

    @field_validator("serve")
    @classmethod
    def _engines_once(cls, serve: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(serve)) != len(serve):
            raise ValueError("each engine of a version once")
        return serve
