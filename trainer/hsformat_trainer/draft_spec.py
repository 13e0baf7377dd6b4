"""What a draft is: its sizes, norms, rotary embedding and vocabulary. Importing this module brings no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from hsformat.models import Frozen

__all__ = ["DraftSpec"]

Size = Annotated[int, Field(gt=0)]


class DraftSpec(Frozen):
    """A draft of Llama shape with EAGLE-3's input: ``cat([norm(embedding), norm(fc(captures))])`` of its first layer.

    Attributes
    ----------
    target_hidden_size, num_aux
        Width of the target's states and how many captures ``fc`` concatenates.
    hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim
        Of the draft; ``num_heads * head_dim`` may differ from ``hidden_size``. The embedding that the draft is fed has
        its own width, so that a ``hidden_size`` other than the target's needs ``train_embedding``.
    rms_norm_eps, hidden_act
        Of all norms of the draft; of its MLP.
    attention_bias
        Whether q, k and v projections have a bias.
    rope
        Transformers' ``rope_parameters``: ``rope_type``, ``rope_theta``, and what the type needs.
    max_position_embeddings
        Bounds the positions; also a parameter of ``dynamic`` and ``longrope``.
    vocab_size, draft_vocab_size
        V of the target, and rows of the draft's head.
    norm_before_residual, norm_before_fc, fc_norm, norm_output
        As in :class:`hsformat.layout.ServingLayout`.
    later_layers_norm
        Which norm stands before the attention of the layers after the first; None: there is one layer.
    train_embedding, train_head
        Whether the draft has an embedding of its own that is trained, and whether its head is.
    """

    target_hidden_size: Size
    num_aux: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    rms_norm_eps: Annotated[float, Field(gt=0)]
    attention_bias: bool = False
    rope: dict[str, JsonValue]
    max_position_embeddings: Size
    vocab_size: Size
    draft_vocab_size: Size
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    later_layers_norm: Literal["input_layernorm", "hidden_norm"] | None
    train_embedding: bool
    train_head: bool
    hidden_act: Literal["silu"] = "silu"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} key heads evenly")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        if (self.later_layers_norm is None) != (self.num_layers == 1):
            raise ValueError("later_layers_norm is given if and only if there is more than one layer")
        if self.hidden_size != self.target_hidden_size and not (self.train_embedding and self.train_head):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not the target's {self.target_hidden_size}, so that neither its "
                "embedding nor its head can be the draft's: train_embedding and train_head must be true"
            )
        if self.rope.get("rope_type") is None or self.rope.get("rope_theta") is None:
            raise ValueError("rope states rope_type and rope_theta; there is no default")
        return self

    def to_config(self) -> dict[str, Any]:
        """Return the part of a draft's ``config.json`` that follows from its shape, as Transformers 5 names it."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": self.hidden_act,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "rope_parameters": dict(self.rope),
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "tie_word_embeddings": False,
        }
