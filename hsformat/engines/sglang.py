"""SGLang: what is known of it, as rows.

Files are those under ``sglang/srt``. Every release from 0.5.8 to 0.5.23 was read. Layer ids stand in
``eagle_config.eagle_aux_hidden_state_layer_ids`` alone (``model_executor/model_runner.py``, from 0.5.17 on
``model_executor/model_runner_components/spec_aux_hidden_state.py``); ids at the top level are ignored without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from hsformat.engines.rows import CaptureRow, DraftRow, IdKey, IdReader, Loading, NotRun, OptionRule, Unsupported
from hsformat.layout import EAGLE3_SHIFT

__all__ = ["CAPTURES", "DRAFTS", "NOT_RUN", "TITLE", "UNSUPPORTED"]

TITLE = "SGLang"

_RELEASES = (
    "0.5.8", "0.5.8.post1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13",
    "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21",
    "0.5.22", "0.5.23",
)  # fmt: skip


def _releases(first: str, last: str = "0.5.23") -> tuple[str, ...]:
    return _RELEASES[_RELEASES.index(first) : _RELEASES.index(last) + 1]


_PROBE = (
    "hsformat engines probe: ids, order, duplicates, both ends and the default of random targets of 9 and 12 layers, "
    "compared with Transformers in float32 on a CPU: relative error below 2e-6 (tests/data/profiles)"
)

_LLAMA = CaptureRow(
    architectures=("LlamaForCausalLM",),
    rule="shift",
    shift=1,
    lowest=1,
    deepest="N-1",
    default=("2", "N//2", "N-3"),
    order="ascending",
    duplicates="once",
    norm="none",
    source="ids 0, 1, 5, 14, 28 and 29 of SmolLM2-135M (30 layers), compared with Transformers in float32 on a CPU; id "
    "29 kills the engine at the first forward pass",
    versions=("0.5.23",),
    evidence="ran",
)


def _read(architectures: tuple[str, ...], versions: tuple[str, ...], source: str, **facts: object) -> CaptureRow:
    known = {"architectures": architectures, "versions": versions, "source": source, "evidence": "read"}
    return CaptureRow.model_validate({**dict(_LLAMA), **known, **facts})


_PROBED = ("MistralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Further targets that ran in 0.5.23: the profiles in tests/data/profiles."""

_FURTHER = {
    "models/llama.py": ("0.5.8", ("Phi3ForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM")),
    "models/mistral.py": ("0.5.8", ("MistralForCausalLM",)),
    "models/qwen2.py": ("0.5.8", ("Qwen2ForCausalLM",)),
    "models/qwen3.py": ("0.5.8", ("Qwen3ForCausalLM",)),
    "models/qwen2_moe.py": ("0.5.8", ("Qwen2MoeForCausalLM",)),
    "models/qwen3_moe.py": ("0.5.8", ("Qwen3MoeForCausalLM",)),
    "models/qwen3_next.py": ("0.5.9", ("Qwen3NextForCausalLM",)),
    "models/qwen2_5_vl.py": ("0.5.8", ("Qwen2_5_VLForConditionalGeneration",)),
    "models/qwen3_vl.py": ("0.5.11", ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")),
    "models/qwen3_5_text.py": ("0.5.22", ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")),
    "models/mllama4.py, models/llama4.py": ("0.5.8", ("Llama4ForConditionalGeneration",)),
    "models/apertus.py": ("0.5.8", ("ApertusForCausalLM",)),
    "models/glm4_moe.py": ("0.5.8", ("Glm4MoeForCausalLM",)),
    "models/minimax_m2.py": ("0.5.8", ("MiniMaxM2ForCausalLM",)),
    "models/longcat_flash.py": ("0.5.8", ("LongcatFlashForCausalLM",)),
    "models/bailing_moe.py": (
        "0.5.9",
        ("BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    ),
    "models/exaone_moe.py": ("0.5.9", ("ExaoneMoEForCausalLM",)),
}
"""Files, the first release that captures there, and architectures: id k is the state before layer k + 1."""


def _further() -> Iterator[CaptureRow]:
    for file, (first, names) in _FURTHER.items():
        if ran := tuple(n for n in names if n in _PROBED):
            yield _read(ran, _releases(first, "0.5.22"), file)
        if rest := tuple(n for n in names if n not in _PROBED):
            yield _read(rest, _releases(first), file)


_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
_DSA = ("GlmMoeDsaForCausalLM",)
_KIMI = ("KimiK25ForConditionalGeneration",)
_LITE = ("Glm4MoeLiteForCausalLM",)
_DEEPSEEK_FILE = "models/deepseek_v2.py"


def _first_id(architectures: tuple[str, ...], file: str, embedding_since: str) -> Iterator[CaptureRow]:
    """Yield the rows of the rule of PR#25454; from ``embedding_since`` on id 0 is the embedding's output.

    Before, the state that was captured was a sum with the residual, which the first layer does not have yet.
    """
    added = f"{file}: one is added if the first id is 1, otherwise not (sglang PR#25454)"
    rule = "shift_if_first_is_one"
    before = _RELEASES[_RELEASES.index(embedding_since) - 1]
    yield _read(architectures, _releases("0.5.13", before), f"{added}; id 0 fails", rule=rule)
    source = f"{added}; id 0 is captured (layers/communicator.py, from 0.5.21 on layers/layer_boundary)"
    yield _read(architectures, _releases(embedding_since), source, rule=rule, lowest=0)


CAPTURES = (
    _LLAMA,
    _read(("LlamaForCausalLM",), _releases("0.5.8", "0.5.22"), "models/llama.py"),
    CaptureRow.model_validate({**dict(_LLAMA), "architectures": _PROBED, "source": _PROBE}),
    *_further(),
    _read(("ExaoneMoeForCausalLM",), _releases("0.5.22"), "models/exaone_moe.py"),
    _read(_DEEPSEEK, _releases("0.5.8", "0.5.12.post1"), _DEEPSEEK_FILE),
    _read(_DSA, _releases("0.5.9", "0.5.12.post1"), f"models/glm4_moe.py, {_DEEPSEEK_FILE}"),
    *_first_id(_DSA, f"models/glm4_moe.py, {_DEEPSEEK_FILE}", "0.5.14"),
    *_first_id(_DEEPSEEK, _DEEPSEEK_FILE, "0.5.14"),
    _read(_KIMI, _releases("0.5.10", "0.5.12.post1"), f"models/kimi_k25.py, {_DEEPSEEK_FILE}"),
    *_first_id(_KIMI, f"models/kimi_k25.py, {_DEEPSEEK_FILE}", "0.5.14"),
    *_first_id(_LITE, "models/glm4_moe_lite.py", "0.5.21"),
    _read(("GptOssForCausalLM",), _releases("0.5.8", "0.5.16"), "models/gpt_oss.py"),
    _read(
        ("GptOssForCausalLM",),
        _releases("0.5.17"),
        "models/gpt_oss.py: nothing is added if the largest id is N (sglang PR#32334), and id 0 is then captured",
        rule="shift_unless_max_is_n",
        lowest=0,
        deepest="N",
    ),
    _read(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _releases("0.5.12", "0.5.16"),
        "models/gemma3_causal.py, models/gemma3_mm.py",
        deepest="N",
    ),
    _read(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        _releases("0.5.12"),
        "models/gemma4_causal.py, models/gemma4_mm.py",
        deepest="N",
    ),
    _read(("MiniMaxM3SparseForCausalLM",), _releases("0.5.16", "0.5.22"), "models/minimax_m3.py"),
    _read(("MiniMaxM3SparseForCausalLM",), _releases("0.5.23"), "models/minimax_m3.py", deepest="N"),
    _read(
        ("MiniMaxM3SparseForConditionalGeneration",),
        _releases("0.5.18", "0.5.22"),
        "models/minimax_m3_vl.py: one is added to the default, too",
        default=("3", "N//2+1", "N-2"),
    ),
    _read(
        ("MiniMaxM3SparseForConditionalGeneration",),
        _releases("0.5.23"),
        "models/minimax_m3_vl.py: one is added to the default, too",
        default=("3", "N//2+1", "N-2"),
        deepest="N",
    ),
)

UNSUPPORTED = (
    Unsupported(
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        reason="what it captures is the output of a layer's MLP without the residual",
        versions=_releases("0.5.17"),
        source="models/gemma3_causal.py: layers return hidden states and residual apart, the first alone is captured",
        evidence="read",
    ),
    Unsupported(
        architectures=("Glm5NextForConditionalGeneration",),
        reason="hyper-connections keep several residual streams",
        versions=_releases("0.5.20"),
        source="models/glm5_next.py",
        evidence="read",
    ),
)


NOT_RUN = (
    NotRun(
        what="DeepseekV2ForCausalLM, and with it latent attention",
        reason="no published package has its kernels for a CPU; with the stand-in of scripts/engines it starts and "
        "drafts, but what it captures is no state of the same model in Transformers (relative error above 1 from the "
        "first token on)",
        versions=("0.5.23",),
    ),
    NotRun(
        what="Gemma4ForCausalLM, Gemma4ForConditionalGeneration",
        reason="of attention on a CPU it takes intel_amx alone for them, and refuses torch_native "
        "(arg_groups/model_hook.py). On any device, Gemma4ForCausalLM whose full layers have wider heads ends before "
        "that: get_config asks for head_dim, which Transformers 5.19.0, the one that it brings, refuses where layers "
        "differ (AmbiguousGlobalPerLayerAttributeError); the config of Gemma4ForConditionalGeneration it reads",
        versions=("0.5.23",),
    ),
)


def _option(*keys: str, combine: str = "first") -> OptionRule:
    return OptionRule.model_validate({"keys": keys, "combine": combine, "default": False})


_LOADING = Loading(
    mlp_width="llama4",
    null_target_width="fails",
    no_draft_vocab="fails",
    empty_ids="nothing",
    hidden_keys=(),
    map_name="anywhere",
    other_names={"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"},
    skipped=(),
    query_rank="any",
    config_class=True,
    needed=(),
    source="models/llama_eagle3.py (intermediate_size_mlp of llama4_text; hasattr of target_hidden_size, null times 3; "
    "load_weights), speculative/eagle_worker_v2.py (init_lm_head), set_eagle3_layers_to_capture: an empty list is not "
    "None",
)


def _loading(base: Loading, **facts: object) -> Loading:
    return Loading.model_validate({**dict(base), **facts})


_PLAIN = DraftRow(
    layout="plain",
    architectures=("LlamaForCausalLMEagle3",),
    attention="llama",
    readers=(
        IdReader(
            name="",
            keys=(IdKey(path="eagle_config.eagle_aux_hidden_state_layer_ids", plus=0),),
            positions="refused",
        ),
    ),
    count_keys=("num_aux_hidden_states", "eagle_config.eagle_aux_hidden_state_layer_ids"),
    count_default=3,
    norm_before_residual=_option(),
    norm_before_fc=_option("eagle_config.norm_before_fc", "norm_before_fc"),
    fc_norm=_option("fc_norm", "use_aux_norm", combine="any"),
    norm_output=_option("norm_output"),
    attention_bias=_option(),
    output_bias=_option("attention_bias", "bias", combine="any"),
    mlp_bias=_option(),
    fc_bias=_option("bias"),
    embedding="own_if_other_width",
    head="own_unless_no_draft_vocab",
    tied_head="embedding",
    full_vocabulary_map=True,
    single_capture_skips_fc=True,
    max_layers=None,
    later_layers_norm="hidden_norm",
    weight_prefixes=("", "model."),
    layer_names=("midlayer", "layers.0"),
    unknown_weights="dropped",
    rope_layouts=("rope_theta", "rope_parameters"),
    partial_rotary_keys=("partial_rotary_factor",),
    shift=EAGLE3_SHIFT,
    loading=_LOADING,
    source="hsformat engines probe --drafts, on a CPU: logits of two drafted tokens of 32 folders against NumPy "
    "(tests/data/profiles); models/llama_eagle3.py, speculative/eagle_worker_v2.py",
    versions=("0.5.23",),
    evidence="ran",
)


def _draft(row: DraftRow, versions: tuple[str, ...], **facts: object) -> DraftRow:
    known = {"evidence": "read", "versions": versions, "source": "models/llama_eagle3.py"}
    return DraftRow.model_validate({**dict(row), **known, **facts})


_NEVER = _option()
_NO_NORM_BEFORE_FC = _draft(_PLAIN, _releases("0.5.12", "0.5.16"), norm_before_fc=_NEVER)
_THREE_CAPTURES = _draft(
    _PLAIN,
    _releases("0.5.10", "0.5.11"),
    source="models/llama_eagle3.py: fc takes 3 captures; one layer, named midlayer; another name is dropped",
    count_keys=(),
    norm_before_fc=_NEVER,
    fc_norm=_NEVER,
    norm_output=_NEVER,
    max_layers=1,
    layer_names=("midlayer",),
    loading=_loading(_LOADING, other_names={}),
)
_MLA = _draft(
    _PLAIN,
    _releases("0.5.13"),
    source="models/kimi_k25_eagle3.py",
    architectures=("Eagle3DeepseekV2ForCausalLM",),
    attention="mla",
    count_keys=("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    norm_before_fc=_NEVER,
    output_bias=_NEVER,
    embedding="own_if_other_width",
    weight_prefixes=("",),
    max_layers=1,
    loading=_loading(
        _LOADING,
        mlp_width="intermediate_size",
        null_target_width="absent",
        no_draft_vocab="null",
        map_name="part",
        other_names={},
        query_rank="needed",
        source="models/kimi_k25_eagle3.py",
    ),
)

DRAFTS = (
    _PLAIN,
    _draft(_PLAIN, _releases("0.5.17", "0.5.22")),
    _NO_NORM_BEFORE_FC,
    _THREE_CAPTURES,
    _draft(
        _THREE_CAPTURES,
        _releases("0.5.8", "0.5.9"),
        source=f"{_THREE_CAPTURES.source}; Transformers 4.57",
        rope_layouts=("rope_theta",),
    ),
    _MLA,
    _draft(_MLA, _releases("0.5.12", "0.5.12.post1"), source=_MLA.source, fc_norm=_NEVER, norm_output=_NEVER),
)
