"""vLLM in this process: loads a target, runs requests, and says where their states are. In the child alone.

The engine core is stepped by this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): a failure of it is an exception here,
and there is no third process to lose. The workers of tensor parallelism are processes of their own.

In-process, vLLM 0.32.0 hands a finished request out before its states are written: the connector is told of it in the
next step (``v1/core/sched/scheduler.py``, ``build_connector_meta``), which nobody takes when no request is left. So
steps are taken until every file is there, or nothing happened for ``timeout`` seconds.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsformat.problems import HsError, problem
from hsformat_extractors.hosted.beat import Beat
from hsformat_extractors.hosted.final_norm import final_norm_facts
from hsformat_extractors.hosted.options import request_seconds
from hsformat_extractors.hosted.preflight import installed_version
from hsformat_extractors.hosted.vllm_setup import (
    CPU_ENVIRONMENT,
    FAILED,
    not_written,
    speculation,
    transfer,
    wanted_slots,
)
from hsformat_extractors.hosted.wire import Answer, Ask, Fault, Launch
from hsformat_extractors.vllm import VllmExtractor

__all__ = ["VllmDriver", "sampling_arguments"]

MAX_NUM_SEQS = 256
_OWN_ARGUMENTS = frozenset(n for rule in VllmExtractor.forbidden if not rule.allowed for n in rule.names)
"""What ``engine_args`` may not hold, whatever its value."""
_PAUSE = 0.002
"""Seconds between two looks for files when the engine has nothing to do."""


class VllmDriver:
    """Runs vLLM's ``LLM``. See :class:`hsformat_extractors.hosted.wire.Driver`."""

    def __init__(self) -> None:
        self._launch: Launch | None = None
        self._llm: Any = None
        self._timeout = 0.0
        self.beat = Beat()

    def start(self, launch: Launch) -> Mapping[str, Any]:
        """Load the target.

        Raises
        ------
        HsError
            HS410: vLLM does not capture a depth of this architecture; an option.
        """
        self.stop()
        version = installed_version("vllm")  # its CPU build is another distribution
        if version is None:
            raise HsError(problem("HS410", where="extractor vllm", got="not installed: vllm", expected="vllm"))
        slots = wanted_slots(
            launch.captures,
            version=version,
            architecture=launch.architecture,
            num_layers=launch.num_layers,
            profile=launch.options.get("engine_profile"),
        )
        arguments = _arguments(launch)
        arguments["speculative_config"] = speculation(slots)
        facts = final_norm_facts(launch.model) if slots.normed else None
        arguments["kv_transfer_config"] = transfer(slots, storage=launch.staging, final_norm=facts)
        self._timeout = request_seconds(launch.options)
        on_cpu = _prepare()
        if on_cpu:
            arguments.setdefault("enforce_eager", True)  # nothing is gained there, and compiling takes minutes
            if launch.sampling and not _draws_rightly():
                raise HsError(
                    problem("HS410", where="generation: sampled", got=f"vLLM {version} on a CPU",
                            expected="an accelerator: on a CPU it draws with a temperature, top-k and top-p from "
                            "memory that nobody wrote (utils/cpu_triton_utils.py, _expand_kernel_impl)",
                            fix="generate greedily, or use another engine on a CPU")
                )  # fmt: skip
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._launch = launch
        told = {k: v for k, v in arguments.items() if k not in ("model", "kv_transfer_config")}
        longest = int(self._llm.llm_engine.model_config.max_model_len)
        return {
            "versions": {"vllm": version, "torch": importlib.metadata.version("torch")},
            "device": _device(),
            "engine": json.loads(json.dumps({**told, "layer_ids": list(slots.ids)})),
            # A prompt is run with one more token, which is thrown away; of an answer the last token is never run.
            "max_tokens": longest if launch.max_new_tokens else longest - 1,
        }

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        """Give all to the engine; yield each as soon as its file is there."""
        launch, engine = self._require()
        running = {ask.request for ask in asks}
        written: dict[str, tuple[Answer, Path]] = {}
        try:
            for fault in self._add(engine, launch, asks):
                running.discard(fault.request)
                yield fault
            moved = time.monotonic()
            while running or written:
                found: list[Answer | Fault] = []
                outputs = engine.step()
                if outputs:  # of requests that are not done as well
                    moved = time.monotonic()
                    self.beat()
                for output in outputs:
                    if output.finished and output.request_id in running:
                        running.discard(output.request_id)
                        done = _finished(output, answers=launch.max_new_tokens > 0)
                        if isinstance(done, Fault):
                            found.append(done)
                        else:
                            written[output.request_id] = done
                for request in list(written):
                    if (arrived := _arrived(*written[request])) is not None:
                        del written[request]
                        found.append(arrived)
                        moved = time.monotonic()
                yield from found
                if found:
                    moved = time.monotonic()  # however long the caller took
                elif time.monotonic() - moved > self._timeout:
                    late = f"nothing came for {self._timeout:.0f} s"
                    if running:
                        in_hand = f"with {len(running)} requests in hand"
                        raise TimeoutError(f"vLLM does not answer any more: {late}, {in_hand}")
                    for request in sorted(written):
                        yield Fault(request=request, message=f"no file of its states: {late}", again=True)
                    return
                elif not running:
                    time.sleep(_PAUSE)
        finally:
            if running:
                engine.abort_request(sorted(running))

    def stop(self) -> None:
        """End the engine; its workers are told to, and the device's memory is given back."""
        if self._llm is None:
            return
        engine, self._llm, self._launch = self._llm.llm_engine, None, None
        engine.engine_core.shutdown()
        del engine
        gc.collect()

    def _require(self) -> tuple[Launch, Any]:
        if self._llm is None or self._launch is None:
            raise RuntimeError("start() comes first")
        return self._launch, self._llm.llm_engine

    def _add(self, engine: Any, launch: Launch, asks: Sequence[Ask]) -> Iterator[Fault]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError

        for ask in asks:
            arguments = sampling_arguments(launch, ask)
            extra = {"kv_transfer_params": {"include_output_tokens": launch.max_new_tokens > 0}}
            params = SamplingParams(**arguments, detokenize=False, extra_args=extra)
            try:
                engine.add_request(ask.request, {"prompt_token_ids": list(ask.prompt)}, params)
            except (VLLMClientError, ValueError) as e:  # too long; it is never cut
                yield Fault(request=ask.request, message=str(e))


_NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
}  # fmt: skip


def sampling_arguments(launch: Launch, ask: Ask) -> dict[str, Any]:
    """Return what vLLM's ``SamplingParams`` and its server both take.

    Where states of given tokens are wanted, one token is written, which vLLM cannot do without. The stop tokens are
    those of the launch alone: ``ignore_eos`` leaves out those that vLLM reads in the model's folder. An answer is drawn
    by the request's own seed, so that it does not depend on what runs beside it.

    Whatever is not asked for is said to be neutral: a server fills it from the folder's ``generation_config.json``
    (0.32.0, ``get_diff_sampling_param``), under which a greedy answer is not what the target says.
    """
    if not launch.max_new_tokens:
        return {**_NEUTRAL, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    sampling = {k: launch.sampling[k] for k in ("temperature", "top_p", "top_k") if launch.sampling.get(k) is not None}
    if sampling:
        sampling["seed"] = ask.seed if ask.seed is not None else launch.sampling.get("seed")
    return {
        **_NEUTRAL,
        "max_tokens": min(launch.max_new_tokens, ask.max_new_tokens or launch.max_new_tokens),
        "stop_token_ids": list(launch.stop_token_ids),
        "ignore_eos": True,
        "temperature": 0.0,
        **sampling,
    }


def _arguments(launch: Launch) -> dict[str, Any]:
    """Return the arguments of ``LLM`` but for those of capturing.

    Raises
    ------
    HsError
        HS410: an argument that is not to be given; replicas, which ``LLM`` refuses (0.32.0, entrypoints/llm.py).
    """
    options = launch.options
    further = json.loads(options.get("engine_args", "{}"))
    if taken := sorted(_OWN_ARGUMENTS & set(further)):
        raise HsError(
            problem("HS410", where="option engine_args", got=", ".join(taken), expected="other arguments of vLLM",
                    fix="leave them out: they follow from the request, or have an option of their own")
        )  # fmt: skip
    if int(options.get("data_parallel", "1")) > 1:
        raise HsError(
            problem("HS410", where="option data_parallel", got=options["data_parallel"],
                    expected="1: vLLM runs several replicas behind a server alone",
                    fix="start a server (python -m hsformat_extractors.hosted.vllm_serve ... -- --data-parallel-size "
                    f"{options['data_parallel']}) and give --option server=URL; or run one extraction a replica, each "
                    "with its share of the data")
        )  # fmt: skip
    return {
        "model": launch.model,
        "dtype": launch.dtype,
        "skip_tokenizer_init": True,  # only ids go in and come out
        "tensor_parallel_size": int(options.get("tensor_parallel", "1")),
        "max_num_batched_tokens": launch.batch_tokens,
        "max_num_seqs": max(1, min(MAX_NUM_SEQS, launch.batch_tokens)),
        "enable_prefix_caching": False,  # rows of a cached prefix are not computed, and lost (vllm#44485)
        "disable_log_stats": True,
        "seed": 0,
        **further,
    }


def _prepare() -> bool:
    """Set the environment that vLLM reads, and return whether it runs on a CPU. What the user set stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return True


def _draws_rightly() -> bool:
    """Return whether the stand-in for a Triton kernel gives each drafted token its request's temperature.

    In 0.32.0 it writes into a copy of its output, which is lost (``_ensure_int64``). An accelerator runs the kernel.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return True
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    out = torch.zeros(3)
    cpu_triton_utils._expand_kernel_impl(out, torch.tensor([0.5, 0.25]), torch.tensor([1, 3]), 0, 0)
    return out.tolist() == [0.5, 0.25, 0.25]


def _device() -> str:
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


def _finished(output: Any, *, answers: bool) -> tuple[Answer, Path] | Fault:
    """Return what is known of a finished request, and where its states will be."""
    told = (output.kv_transfer_params or {}).get("hidden_states_path")
    if told is None:
        reason = output.outputs[0].finish_reason if output.outputs else "no output"
        return Fault(request=output.request_id, message=f"ended without states: {reason}", again=True)
    new, path = tuple(output.outputs[0].token_ids), Path(told)
    tokens = (*output.prompt_token_ids, *(new if answers else ()))
    next_token = new[0] if new and not answers else None
    return Answer(request=output.request_id, tokens=tokens, file=path.name, next_token=next_token), path


def _arrived(answer: Answer, path: Path) -> Answer | Fault | None:
    """Return the answer when its file is there, a fault when the connector says why not, or None: not yet."""
    if path.exists():
        return answer
    failed = path.with_name(path.name + FAILED)
    return not_written(answer.request, failed) if failed.exists() else None
