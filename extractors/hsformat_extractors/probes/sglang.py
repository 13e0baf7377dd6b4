"""The probe of SGLang: a hook that its option ``forward_hooks`` installs inside its scheduler process."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from hsformat_extractors.probes.probe import Probe
from hsformat_extractors.probes.serve import Job, job_of

__all__ = ["SglangDriver", "SglangProbe", "watch_factory"]


class SglangProbe(Probe):
    """Probes the SGLang that is installed."""

    name: ClassVar[str] = "sglang"
    package: ClassVar[str] = "sglang"
    install: ClassVar[str] = "pip install sglang, or without a GPU: scripts/engines/setup_sglang_cpu.sh VENV"
    driver: ClassVar[str] = "hsformat_extractors.probes.sglang:SglangDriver"

    def environment(self) -> dict[str, str]:
        """Return what keeps SGLang off the network, and off the GPU where there is none."""
        import torch

        cpu = {} if torch.cuda.is_available() else {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return {"HF_HUB_OFFLINE": "1", **cpu}


class SglangDriver:
    """Serves drafts in processes that SGLang starts. See :class:`~hsformat_extractors.probes.serve.Driver`.

    Without a GPU its processes are forks of one that has imported all of it: SGLang 0.5.23 spawns two, and imports of
    16 and 19 s of CPU are most of what a start costs. CUDA does not survive a fork.
    """

    def prepare(self) -> bool:
        """Import, where there is no GPU, what all processes of SGLang import, and let them be forked."""
        import torch

        if torch.cuda.is_available():
            return False
        for name in ("sglang", "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"):
            importlib.import_module(name)
        multiprocessing.set_start_method("fork", force=True)
        # SGLang sets it to "spawn" whenever an engine starts.
        vars(multiprocessing)["set_start_method"] = lambda *_args, **_options: None
        return True

    def serve(self, job: Job) -> None:
        """Generate three tokens with the draft, while the modules of the scheduler's process are watched."""
        import sglang
        import torch

        device: dict[str, Any] = {}
        if not torch.cuda.is_available():
            # Its only attention on a CPU that can verify drafts.
            amx = "intel_amx"
            device = {"device": "cpu", "prefill_attention_backend": amx, "decode_attention_backend": amx}
        engine = sglang.Engine(
            model_path=job.target,
            dtype=job.dtype,
            random_seed=0,
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=job.draft,
            speculative_num_steps=2,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=3,
            disable_radix_cache=True,
            disable_cuda_graph=True,
            skip_server_warmup=True,
            sampling_backend="pytorch",
            grammar_backend="none",
            host="127.0.0.1",
            mem_fraction_static=0.3,
            max_total_tokens=512,
            max_running_requests=2,
            log_level="error",
            forward_hooks=[
                {
                    "name": "hsformat-probe",
                    "target_modules": ["logits_processor"],
                    "hook_factory": f"{__name__}:watch_factory",
                    "config": asdict(job),
                }
            ],
            **device,
        )
        try:
            greedy = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
            engine.generate(input_ids=list(job.prompt), sampling_params=greedy)
        finally:
            engine.shutdown()


def watch_factory(config: Mapping[str, Any]) -> Callable[..., None]:
    """Watch all modules of this process from now on; the hook itself, which SGLang puts on one module, does nothing."""
    from hsformat_extractors.probes.watch import watching

    watching(job_of(config))
    return lambda *_args: None
