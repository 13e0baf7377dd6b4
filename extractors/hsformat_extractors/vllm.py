"""The vLLM extractor: vLLM in a child process (``hosted.vllm_driver``), or a server of it (``hosted.vllm_server``).

States come from vLLM's own speculative method ``extract_hidden_states``; depth N after the final norm is computed from
the one before it. Importing this brings no vLLM.

Options, beside those that all hosted engines share (``hosted.options``): with ``server``, ``storage`` (the folder in
which the server's files are found here), ``concurrency`` (requests at a time) and ``api_key`` (the name of the
environment variable that holds it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from hsformat.extraction.protocol import ExtractionRequest
from hsformat.problems import Problem, problem
from hsformat_extractors.hosted.extractor import HostedExtractor
from hsformat_extractors.hosted.options import API_KEY, EngineOption, Forbidden, at_least

__all__ = ["VllmExtractor"]


class VllmExtractor(HostedExtractor):
    """Extracts with vLLM. See :class:`hsformat.extraction.protocol.Extractor`."""

    name: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vllm"
    minimum: ClassVar[str] = "0.32.0"
    install: ClassVar[str] = "pip install 'hsformat[vllm]', or without a GPU: scripts/engines/setup_vllm_cpu.sh VENV"
    driver: ClassVar[str] = "hsformat_extractors.hosted.vllm_driver:VllmDriver"
    server_driver: ClassVar[str | None] = "hsformat_extractors.hosted.vllm_server:VllmServerDriver"
    applies_norm: ClassVar[bool] = True
    options: ClassVar[tuple[EngineOption, ...]] = (
        EngineOption(name="storage", expected="a folder, with server", valid=bool),
        EngineOption(name="concurrency", expected="a number of requests, at least 1", valid=at_least(1)),
        API_KEY,
    )
    for_servers: ClassVar[tuple[str, ...]] = ("storage", "concurrency", "api_key")
    forbidden: ClassVar[tuple[Forbidden, ...]] = (
        Forbidden(
            names=("enable_prefix_caching",),
            why="rows of a cached prefix are not computed, and lost (vllm#44485)",
            fix="leave it out: prefix caching is off",
        ),
        Forbidden(
            names=(
                "speculative_config",
                "speculative_model",
                "spec_method",
                "spec_model",
                "spec_tokens",
                "kv_transfer_config",
            ),
            why="states are taken out by them; a draft beside that would return rows of its own steps",
            fix="leave it out",
        ),
        Forbidden(
            names=("pipeline_parallel_size", "pp_size"),
            why="what earlier stages captured is dropped (vllm PR#45985)",
            fix="use --option tensor_parallel=N",
        ),
        Forbidden(
            names=("tensor_parallel_size", "tp_size"), why="there is an option for it", fix="--option tensor_parallel=N"
        ),
        Forbidden(
            names=("data_parallel_size", "dp_size"), why="there is an option for it", fix="--option data_parallel=N"
        ),
        Forbidden(
            names=("model", "tokenizer", "dtype", "skip_tokenizer_init", "max_num_batched_tokens", "runner", "task"),
            why="it follows from the command",
            fix="say --model, --dtype or --batch-tokens",
        ),
        Forbidden(
            names=("generation_config", "override_generation_config"),
            allowed=("vllm",),
            why="answers are drawn as the command says, whatever a file of the folder says",
            fix="say --temperature, --top-p or --top-k",
        ),
        Forbidden(
            names=(
                "quantization",
                "quantization_config",
                "hf_overrides",
                "hf_config_path",
                "config_format",
                "model_weights",
                "model_class_overrides",
                "revision",
                "load_format",
                "model_loader_extra_config",
                "kv_cache_dtype",
                "kv_cache_dtype_skip_layers",
                "kv_sharing_fast_prefill",
                "disable_sliding_window",
                "enable_lora",
                "default_mm_loras",
            ),
            allowed=("auto", None, False),
            why="another model than the folder describes would be run, under the contract of this one",
            fix="leave it out; a quantised target is a folder of its own, whose config says so",
        ),
        Forbidden(
            names=("trust_remote_code",), why="code of a model folder is never run", fix="use a model that vLLM knows"
        ),
    )

    def further_problems(self, request: ExtractionRequest) -> Iterator[Problem]:
        """Refuse replicas in one process, which vLLM's ``LLM`` does not have."""
        replicas = request.options.get("data_parallel", "1")
        if "server" not in request.options and at_least(2)(replicas):
            yield problem("HS410", where="option data_parallel", got=replicas,
                          expected="1: vLLM runs several replicas behind a server alone",
                          fix="start a server of vLLM and give --option server=URL; or run one extraction a replica, "
                          "each with its share of the data")  # fmt: skip
