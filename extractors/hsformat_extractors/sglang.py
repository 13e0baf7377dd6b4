"""The SGLang extractor: SGLang below a child process (``hosted.sglang_driver``), or a server of it.

States come from SGLang's own option for auxiliary hidden states, and from a hook that it installs in its scheduler;
depth N is taken at the final norm, before it or after it. Importing this brings no SGLang.

Options are those that all hosted engines share (``hosted.options``).
"""

from __future__ import annotations

from typing import ClassVar

from hsformat_extractors.hosted.extractor import HostedExtractor
from hsformat_extractors.hosted.options import API_KEY, EngineOption, Forbidden
from hsformat_extractors.hosted.preflight import Ends

__all__ = ["OTHER_MODEL", "SglangExtractor"]


OTHER_MODEL = Forbidden(
    names=(
        "quantization", "quantize_and_serve", "modelopt_quant", "rl_quant_profile", "torchao_config",
        "quantization_param_path", "json_model_override_args", "model_override_args", "decrypted_config_file",
        "model_config_parser", "revision", "load_format", "custom_weight_loader", "model_loader_extra_config",
        "kv_cache_dtype", "enable_lora", "lora_paths", "modelopt_checkpoint_restore_path",
    ),
    allowed=("auto", None, False),
    why="another model than the folder describes would be run, under the contract of this one",
    fix="leave it out; a quantised target is a folder of its own, whose config says so",
)  # fmt: skip
"""Arguments that make another model of the target's folder; of a server they are compared with what it tells."""


class SglangExtractor(HostedExtractor):
    """Extracts with SGLang. See :class:`hsformat.extraction.protocol.Extractor`."""

    name: ClassVar[str] = "sglang"
    package: ClassVar[str] = "sglang"
    minimum: ClassVar[str] = "0.5.23"
    install: ClassVar[str] = (
        "pip install 'hsformat[sglang]', or without a GPU: scripts/engines/setup_sglang_cpu.sh VENV"
    )
    driver: ClassVar[str] = "hsformat_extractors.hosted.sglang_driver:SglangDriver"
    server_driver: ClassVar[str | None] = "hsformat_extractors.hosted.sglang_server:SglangServerDriver"
    options: ClassVar[tuple[EngineOption, ...]] = (API_KEY,)
    beyond: ClassVar[tuple[Ends, ...]] = ("last", "last_normed")
    forbidden: ClassVar[tuple[Forbidden, ...]] = (
        Forbidden(
            names=("disable_radix_cache",),
            why="rows of a cached prefix are not computed, and lost (sglang#4997)",
            fix="leave it out: the radix cache is off",
        ),
        Forbidden(
            names=(
                "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model",
                "enable_return_aux_hidden_states", "return_aux_hidden_state_layer_ids", "forward_hooks",
            ),
            why="states are taken out by them; a draft beside that truncates what is returned (sglang#26163)",
            fix="leave it out",
        ),
        Forbidden(
            names=("pp_size", "pipeline_parallel_size"),
            why="what earlier stages captured is dropped (sglang PR#39644)",
            fix="use --option tensor_parallel=N",
        ),
        Forbidden(names=("tp_size", "tensor_parallel_size"), why="there is an option for it",
                  fix="--option tensor_parallel=N"),
        Forbidden(names=("dp_size", "data_parallel_size"), why="there is an option for it",
                  fix="--option data_parallel=N"),
        Forbidden(
            names=(
                "disable_cuda_graph", "disable_prefill_cuda_graph", "disable_decode_cuda_graph", "cuda_graph_config",
                "cuda_graph_backend_prefill", "cuda_graph_backend_decode", "enable_two_batch_overlap", "enable_pdmux",
                "disaggregation_mode", "disable_overlap_schedule",
            ),
            why="a graph that is replayed runs no hook, and neither does a part of a batch",
            fix="leave it out",
        ),
        Forbidden(
            names=(
                "model_path", "model", "dtype", "skip_tokenizer_init", "chunked_prefill_size", "max_prefill_tokens",
                "random_seed", "allow_auto_truncate",
            ),
            why="it follows from the command",
            fix="say --model, --dtype, --batch-tokens or --seed",
        ),
        OTHER_MODEL,
        Forbidden(
            names=("trust_remote_code",), why="code of a model folder is never run", fix="use a model that SGLang knows"
        ),
    )  # fmt: skip
