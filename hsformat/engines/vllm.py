"""vLLM: what is known of it, as rows.

Files are those of the vLLM package. Two parts of it look for layer ids: ``v1/worker/gpu_model_runner.py`` (model runner
V1, which the CPU build runs) and ``v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`` (V2, the default on GPUs from
0.32.0 at the latest; in 0.24.0 for six architectures). V2 does not look into
``eagle_config.eagle_aux_hidden_state_layer_ids``: a folder that has its ids there alone is served the default layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hsformat.engines.rows import (
    CaptureRow,
    DraftRow,
    HiddenKey,
    IdKey,
    IdReader,
    Loading,
    NotRun,
    OptionRule,
    Unsupported,
)
from hsformat.layout import EAGLE3_SHIFT

__all__ = ["CAPTURES", "DRAFTS", "NOT_RUN", "TITLE", "UNSUPPORTED"]

TITLE = "vLLM"

_READ = ("0.24.0", "0.32.0", "0.33.0")
_LATE = ("0.32.0", "0.33.0")
_MIXIN = "model_executor/models/interfaces.py (EagleModelMixin, SupportsEagle3)"

_PROBE = (
    "hsformat engines probe: ids, order, duplicates, both ends and the default of random targets of 9 and 12 layers, "
    "compared with Transformers in float32 on a CPU: relative error below 2e-6 (tests/data/profiles)"
)

_LLAMA = CaptureRow(
    architectures=("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    rule="shift",
    shift=0,
    lowest=0,
    deepest="N",
    default=("2", "N//2", "N-3"),
    order="ascending",
    duplicates="once",
    norm="none",
    source="ids 0, 1, 2, 15, 27, 29 and 30 of SmolLM2-135M (30 layers) and tiny Qwen2 and Qwen3, compared with "
    "Transformers in float32 on a CPU: relative error 0 to 2e-6",
    versions=("0.32.0",),
    evidence="ran",
)

_PROBED = ("MistralForCausalLM", "Qwen3MoeForCausalLM", "Gemma4ForCausalLM")
"""Further targets that ran in 0.32.0: the profiles in tests/data/profiles."""

_FURTHER = {
    "llama.py": ("InternLM3ForCausalLM", "IQuestCoderForCausalLM"),
    "mistral.py": ("MistralForCausalLM", "Ministral3ForCausalLM"),
    "phi3.py": ("Phi3ForCausalLM",),
    "qwen3_moe.py": ("Qwen3MoeForCausalLM",),
    "qwen3_next.py": ("Qwen3NextForCausalLM",),
    "qwen2_5_vl.py": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen3_vl.py, qwen3_vl_moe.py": ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    "qwen3_5.py": ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    "gpt_oss.py": ("GptOssForCausalLM",),
    "mllama4.py, llama4.py": ("Llama4ForConditionalGeneration",),
    "minimax_m2.py": ("MiniMaxM2ForCausalLM",),
    "apertus.py": ("ApertusForCausalLM",),
    "gemma4.py, gemma4_mm.py": ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
}
"""Files under model_executor/models whose loop captures id 0 before the first layer and id i + 1 after layer i."""


def _read(row: CaptureRow, architectures: tuple[str, ...], versions: tuple[str, ...], source: str) -> CaptureRow:
    facts = {"architectures": architectures, "versions": versions, "source": source, "evidence": "read"}
    return CaptureRow.model_validate({**dict(row), **facts})


def _further() -> Iterator[CaptureRow]:
    for files, names in _FURTHER.items():
        source = f"model_executor/models/{files}; {_MIXIN}"
        if ran := tuple(n for n in names if n in _PROBED):
            yield _read(_LLAMA, ran, tuple(v for v in _READ if v not in _LLAMA.versions), source)
        if rest := tuple(n for n in names if n not in _PROBED):
            yield _read(_LLAMA, rest, _READ, source)


_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
_DSA = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_BEFORE_EACH = CaptureRow.model_validate({**dict(_LLAMA), "lowest": 1, "deepest": "N-1"})
_AND_AFTER_LAST = CaptureRow.model_validate({**dict(_LLAMA), "lowest": 1})

_AFTER_LAST = "model_executor/models/deepseek_v2.py: after the last layer as well (vllm PR#46973)"

CAPTURES = (
    _LLAMA,
    _read(_LLAMA, _LLAMA.architectures, ("0.24.0", "0.33.0"), f"llama.py, qwen2.py, qwen3.py; {_MIXIN}"),
    CaptureRow.model_validate({**dict(_LLAMA), "architectures": _PROBED, "source": _PROBE}),
    *_further(),
    _read(
        _BEFORE_EACH,
        (*_DEEPSEEK, *_DSA),
        ("0.24.0",),
        "model_executor/models/deepseek_v2.py: the state before each layer, and none after the last (vllm#48124)",
    ),
    CaptureRow.model_validate(
        {
            **dict(_AND_AFTER_LAST),
            "architectures": _DEEPSEEK[:1],
            "source": f"{_PROBE}, with plain attention in place of latent (VLLM_MLA_DISABLE=1); id 0 fails",
        }
    ),
    _read(_AND_AFTER_LAST, _DEEPSEEK[1:], ("0.32.0",), _AFTER_LAST),
    _read(_AND_AFTER_LAST, _DEEPSEEK, ("0.33.0",), _AFTER_LAST),
    _read(
        _BEFORE_EACH,
        _DSA,
        _LATE,
        "models/deepseek_v32/nvidia/model.py, amd/model.py: none after the last layer; id 0 is captured by nvidia/ "
        "alone, amd/ fails at it, so that it is refused for both",
    ),
)  # fmt: skip

_NO_INTERFACE = "the engine refuses to start: the model has no EAGLE-3 interface"

UNSUPPORTED = (
    Unsupported(
        architectures=("Gemma3ForCausalLM",),
        reason=_NO_INTERFACE,
        versions=("0.32.0",),
        source='on a CPU: "Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"',
        evidence="ran",
    ),
    Unsupported(
        architectures=("Gemma3ForCausalLM",),
        reason=_NO_INTERFACE,
        versions=("0.24.0", "0.33.0"),
        source="model_executor/models/gemma3.py: no SupportsEagle3",
        evidence="read",
    ),
    Unsupported(
        architectures=("Gemma2ForCausalLM", "Gemma3ForConditionalGeneration"),
        reason=_NO_INTERFACE,
        versions=_READ,
        source="model_executor/models/gemma2.py, gemma3_mm.py: no SupportsEagle3",
        evidence="read",
    ),
    Unsupported(
        architectures=("KimiK3ForConditionalGeneration",),
        reason="attention residuals keep several streams, and an environment variable says what is captured "
        "(vllm PR#50815)",
        versions=_LATE,
        source="models/kimi_k3/nvidia/model.py",
        evidence="read",
    ),
)

NOT_RUN = (
    NotRun(
        what="model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)",
        reason='"Model Runner V2 requires Triton", with a CPU backend, which Triton 3.9.0 as published does not have '
        "(config/vllm.py, triton_utils/importing.py)",
        versions=("0.32.0",),
    ),
)

_TOP = IdKey(path="eagle_aux_hidden_state_layer_ids", plus=0)
_NESTED = IdKey(path="eagle_config.eagle_aux_hidden_state_layer_ids", plus=0)
_DFLASH = IdKey(path="dflash_config.target_layer_ids", plus=1)
_V1 = IdReader(name="model runner V1", keys=(_TOP, _NESTED, _DFLASH), positions="not_drafted")
_V2_EARLY = IdReader(name="model runner V2", keys=(_TOP, _DFLASH), positions="past_table")
_V2 = IdReader(
    name="model runner V2",
    keys=(
        _TOP,
        _DFLASH,
        IdKey(path="dspark_target_layer_ids", plus=1),
        IdKey(path="target_layer_ids", plus=1),
        IdKey(path="dflash_config.layer_ids", plus=0),
        IdKey(path="eagle_config.layer_ids", plus=0),
    ),
    positions="drafted",
)
_INNER = "transformer_layer_config"
_INNER_TOP = IdKey(path=f"{_INNER}.{_TOP.path}", plus=0)


def _inside(reader: IdReader) -> IdReader:
    """Return where a reader looks in the speculators layout: its config is the decoder's, and ids beside it count."""
    keys = tuple(IdKey(path=f"{_INNER}.{key.path}", plus=key.plus) for key in reader.keys)
    return IdReader(name=reader.name, keys=(_TOP, *keys), positions=reader.positions)


def _option(*keys: str, default: bool = False, combine: Literal["first", "any"] = "first") -> OptionRule:
    return OptionRule(keys=keys, combine=combine, default=default)


_DRAFT_FILES = (
    "model_executor/models/llama_eagle3.py, v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/, "
    "config/speculative.py"
)

_OTHER_NAMES = (
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
"""Further names of the class (model_executor/models/registry.py), under which it was not run."""

_LOADING = Loading(
    mlp_width="intermediate_size",
    null_target_width="fails",
    no_draft_vocab="null",
    empty_ids="absent",
    hidden_keys=(
        HiddenKey(reader=_V1.name, path=_DFLASH.path, by="eagle_config"),
        HiddenKey(reader=_V1.name, path=f"{_INNER}.{_DFLASH.path}", by=f"{_INNER}.eagle_config"),
    ),
    map_name="d2t",
    other_names={},
    skipped=("mask_hidden",),
    query_rank="any",
    config_class=True,
    needed=(),
    source="model_executor/models/llama_eagle3.py and qwen3_eagle3.py (LlamaMLP takes intermediate_size; "
    "target_hidden_size by getattr, null times 3; load_weights), v1/worker/gpu_model_runner.py "
    "(_get_eagle3_aux_layers_from_config: ids of dflash_config are overwritten by those of eagle_config, also by none)",
)

_PLAIN = DraftRow(
    layout="plain",
    architectures=("LlamaForCausalLMEagle3",),
    attention="llama",
    readers=(_V2, _V1),
    count_keys=("num_aux_hidden_states", "eagle_config.eagle_aux_hidden_state_layer_ids"),
    count_default=3,
    norm_before_residual=_option("norm_before_residual"),
    norm_before_fc=_option("eagle_config.norm_before_fc", "norm_before_fc"),
    fc_norm=_option("fc_norm"),
    norm_output=_option("norm_output"),
    attention_bias=_option("attention_bias"),
    output_bias=_option("attention_bias", "bias", combine="any"),
    mlp_bias=_option("mlp_bias"),
    fc_bias=_option(),
    embedding="own",
    head="own",
    tied_head="ignored",
    full_vocabulary_map=False,
    single_capture_skips_fc=False,
    max_layers=None,
    later_layers_norm="input_layernorm",
    weight_prefixes=("",),
    layer_names=("midlayer", "layers.0"),
    unknown_weights="refused",
    rope_layouts=("rope_theta", "rope_parameters"),
    partial_rotary_keys=("rope_parameters.partial_rotary_factor", "partial_rotary_factor"),
    shift=EAGLE3_SHIFT,
    loading=_LOADING,
    source="hsformat engines probe --drafts, on a CPU with model runner V1: logits of two drafted tokens of 32 folders "
    f"against NumPy (tests/data/profiles); V2 in {_DRAFT_FILES}",
    versions=("0.32.0",),
    evidence="ran",
)


def _draft(row: DraftRow, **facts: object) -> DraftRow:
    source = _DRAFT_FILES if row.evidence == "ran" else row.source
    return DraftRow.model_validate({**dict(row), "evidence": "read", "source": source, **facts})


_QWEN3 = _draft(
    _PLAIN,
    architectures=("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM"),
    attention="qwen3",
    output_bias=_option(),
    mlp_bias=_option(),
    count_keys=(
        "num_aux_layers",
        "num_aux_hidden_states",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
    ),
    versions=_LATE,
    source="model_executor/models/qwen3_eagle3.py",
)
_MLA = _draft(
    _PLAIN,
    architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    attention="mla",
    norm_before_fc=_option(),
    attention_bias=_option(),
    output_bias=_option(),
    mlp_bias=_option(),
    loading=Loading.model_validate(
        {**dict(_LOADING), "skipped": (), "source": "model_executor/models/deepseek_eagle3.py"}
    ),
    versions=_LATE,
    source="model_executor/models/deepseek_eagle3.py",
)
_FROM_SPECULATORS = Loading.model_validate(
    {
        **dict(_LOADING), "null_target_width": "absent", "config_class": False, "needed": ("rms_norm_eps",),
        "source": f"{_LOADING.source}; transformers_utils/configs/speculators/: a config object without the constants "
        "of a model's class; target_hidden_size counts where it is not null",
    }
)  # fmt: skip
_SPECULATORS = _draft(
    _PLAIN,
    layout="speculators",
    architectures=("llama",),
    readers=(_inside(_V2), _inside(_V1)),
    count_keys=(f"{_INNER}.num_aux_hidden_states", f"{_INNER}.{_NESTED.path}"),
    norm_before_residual=_option("norm_before_residual", default=True),
    norm_before_fc=_option(f"{_INNER}.eagle_config.norm_before_fc", "norm_before_fc"),
    attention_bias=_option("transformer_layer_config.attention_bias"),
    output_bias=_option("transformer_layer_config.attention_bias", "transformer_layer_config.bias", combine="any"),
    mlp_bias=_option("transformer_layer_config.mlp_bias"),
    loading=_FROM_SPECULATORS,
    versions=_LATE,
    source="transformers_utils/configs/speculators/: the width of fc stays that of 3 captures (vllm#54526)",
)
_SPECULATORS_QWEN3 = _draft(
    _SPECULATORS,
    architectures=("qwen3",),
    attention="qwen3",
    output_bias=_option(),
    mlp_bias=_option(),
    count_keys=(
        f"{_INNER}.num_aux_layers",
        f"{_INNER}.num_aux_hidden_states",
        _TOP.path,
        _INNER_TOP.path,
        f"{_INNER}.{_NESTED.path}",
    ),
    loading=Loading.model_validate(
        {**dict(_FROM_SPECULATORS), "needed": ("rms_norm_eps", "num_key_value_heads", "max_position_embeddings")}
    ),
    source="transformers_utils/configs/speculators/, model_executor/models/qwen3_eagle3.py",
)
_EARLY = {
    "versions": ("0.24.0",),
    "readers": (_V1, _V2_EARLY),
    "full_vocabulary_map": True,
}  # fmt: skip
_EARLY_SPECULATORS = {
    **_EARLY,
    "readers": (_inside(_V1), _inside(_V2_EARLY)),
    "fc_norm": _option("transformer_layer_config.fc_norm"),
    "norm_output": _option("transformer_layer_config.norm_output"),
}

DRAFTS = (
    _PLAIN,
    _draft(_PLAIN, architectures=_OTHER_NAMES, versions=("0.32.0",)),
    _draft(_PLAIN, architectures=(*_PLAIN.architectures, *_OTHER_NAMES), versions=("0.33.0",)),
    _draft(_PLAIN, architectures=(*_PLAIN.architectures, *_OTHER_NAMES), **_EARLY),
    _QWEN3,
    _draft(_QWEN3, **_EARLY),
    _MLA,
    _draft(_MLA, **_EARLY),
    _SPECULATORS,
    _draft(_SPECULATORS, **_EARLY_SPECULATORS),
    _SPECULATORS_QWEN3,
    _draft(_SPECULATORS_QWEN3, **_EARLY_SPECULATORS),
)
