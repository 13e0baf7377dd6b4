"""What a forward pass takes, from the config alone: floating-point operations of the target's layers.

Counted are two operations for each parameter of a matrix that a token goes through (of experts, those that it is
routed to), and the products of attention: two for each number of a key and of a value that a token attends to, in
each head, within the window where a layer slides. Left out are norms, activations, biases and the embedding, which is
a look-up; and the head, except for tokens that the target writes. Matrices as in Transformers 5.24.0. May import
``target.config``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsformat.target.config import ModelConfig

__all__ = ["ForwardCost", "forward_cost"]

_UNGATED = frozenset({"gpt2", "gpt_neox", "starcoder2"})
"""Families whose feed-forward layer is two matrices; all others of the table have three."""

_MOST = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """What a token costs.

    Attributes
    ----------
    layers, head
        Parameters of the layers' matrices that one token goes through, and of the head.
    pairs
        Of each layer, numbers of a key and of a value, over its heads.
    windows
        Of each layer, how many tokens it attends to at most; None: all.
    """

    layers: int
    head: int
    pairs: tuple[int, ...]
    windows: tuple[int | None, ...]

    def operations(self, tokens: int, *, written: int = 0) -> int:
        """Return the operations of one sequence of so many tokens, of which the target writes the last ``written``."""
        met = {w: _pairs(tokens, w) for w in set(self.windows)}
        products = sum(pair * met[w] for pair, w in zip(self.pairs, self.windows, strict=True))
        return 2 * (self.layers * tokens + self.head * written + products)


def forward_cost(config: ModelConfig) -> ForwardCost | str:
    """Return what a token costs, or why that is not known."""
    if config.family is None:
        return f"the matrices of {config.model_type!r} are not in the table of families"
    try:
        return _Counting(config).cost()
    except _Unknown as e:
        return str(e)


class _Unknown(Exception):
    """A key of the config that is needed is missing, or says something else than what is counted here."""


@dataclass(frozen=True, slots=True)
class _Counting:
    config: ModelConfig

    def cost(self) -> ForwardCost:
        layers, hidden = self._size("num_hidden_layers"), self._size("hidden_size")
        attention = [self._attention(i, hidden) for i in range(layers)]
        return ForwardCost(
            layers=sum(n for n, _ in attention) + sum(self._feed_forward(i, hidden) for i in range(layers)),
            head=hidden * self._size("vocab_size"),
            pairs=tuple(pair for _, pair in attention),
            windows=self._windows(layers),
        )

    def _attention(self, layer: int, hidden: int) -> tuple[int, int]:
        heads = self._size("num_attention_heads")
        if self.config.family is not None and self.config.family.latent_attention:
            rope, plain, value = (self._size(k) for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
            rank, query = self._size("kv_lora_rank"), heads * (rope + plain)
            low = self._optional("q_lora_rank")
            queries = hidden * low + low * query if low else hidden * query
            keys = hidden * (rank + rope) + rank * heads * (plain + value)
            return queries + keys + heads * value * hidden, query + heads * value
        if self.config.model_type == "gemma4_text":
            return self._gemma4_attention(layer, hidden, heads)
        width, shared = self._size("head_dim"), self._size("num_key_value_heads")
        return 2 * hidden * width * (heads + shared), 2 * heads * width

    def _gemma4_attention(self, layer: int, hidden: int, heads: int) -> tuple[int, int]:
        """Heads of two widths; values that are the keys; keys and values of an earlier layer."""
        own = (self.config.get("per_layer_config") or {}).get(str(layer), {})
        width = own.get("head_dim") or self._size("head_dim")
        shared = own.get("num_key_value_heads") or self._size("num_key_value_heads")
        kinds = self.config.get("layer_types")  # None: all layers are full
        full = kinds is None or kinds[layer] == "full_attention"
        projected = 0 if self._reuses(layer) else 1 if full and self.config.get("attention_k_eq_v") else 2
        return hidden * width * (2 * heads + projected * shared), 2 * heads * width

    def _reuses(self, layer: int) -> bool:
        return layer >= self._size("num_hidden_layers") - self._optional("num_kv_shared_layers")

    def _gemma4_feed_forward(self, layer: int, hidden: int) -> int:
        """Experts stand beside the dense matrices, and a layer's own input is gated, projected and made of depth 0."""
        doubled = self.config.get("use_double_wide_mlp") and self._reuses(layer)
        out = 3 * hidden * self._size("intermediate_size") * (2 if doubled else 1)
        out += 3 * hidden * self._optional("hidden_size_per_layer_input")
        if self.config.get("enable_moe_block"):
            out += 3 * hidden * self._size("moe_intermediate_size") * self._size("top_k_experts")
            out += hidden * self._size("num_local_experts")
        return out

    def _feed_forward(self, layer: int, hidden: int) -> int:
        if self.config.model_type == "gemma4_text":
            return self._gemma4_feed_forward(layer, hidden)
        matrices = 2 if self.config.model_type in _UNGATED else 3
        if not self._is_sparse(layer):
            if self.config.model_type == "gpt2":
                return matrices * hidden * (self._optional("intermediate_size") or 4 * hidden)
            return matrices * hidden * self._size("intermediate_size")
        size = self._optional("moe_intermediate_size") or self._size("intermediate_size")
        shared = self._optional("shared_expert_intermediate_size") or self._optional("n_shared_experts") * size
        active = self._size("num_experts_per_tok") * size + shared
        return matrices * hidden * active + hidden * self._size("num_local_experts")

    def _is_sparse(self, layer: int) -> bool:
        dense = self.config.get("mlp_only_layers")
        return (
            self._optional("num_local_experts") > 0
            and layer >= self._optional("first_k_dense_replace")
            and (layer + 1) % (self._optional("decoder_sparse_step") or 1) == 0
            and layer % (self._optional("moe_layer_freq") or 1) == 0
            and not (isinstance(dense, list) and layer in dense)
        )

    def _windows(self, layers: int) -> tuple[int | None, ...]:
        window, kinds = self._optional("sliding_window"), self.config.get("layer_types")
        if kinds is None:
            return (window or None,) * layers
        if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise _Unknown(f"layer_types: {repr(kinds)[:60]}, of which full_attention and sliding_attention are known")
        return tuple(window or None if kind == "sliding_attention" else None for kind in kinds)

    def _size(self, key: str) -> int:
        if not (value := self._optional(key)):
            raise _Unknown(f"config.json does not say {key}")
        return value

    def _optional(self, key: str) -> int:
        value = self.config.get(key)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value < _MOST:
            raise _Unknown(f"{key}: {repr(value)[:60]}, which is no size")
        return value


def _pairs(tokens: int, window: int | None) -> int:
    """Return how many tokens all tokens attend to together, each to itself and those before it."""
    n = tokens if window is None else min(tokens, window)
    return n * (n + 1) // 2 + (tokens - n) * n
