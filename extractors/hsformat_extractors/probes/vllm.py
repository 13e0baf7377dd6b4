"""The probe of vLLM: the engine in the child's own process, so that hooks see its modules."""

from __future__ import annotations

import gc
import importlib
from typing import Any, ClassVar

from hsformat_extractors.probes.probe import Probe
from hsformat_extractors.probes.serve import Job

__all__ = ["VllmDriver", "VllmProbe"]


class VllmProbe(Probe):
    """Probes the vLLM that is installed."""

    name: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vllm"
    install: ClassVar[str] = "pip install vllm, or without a GPU: scripts/engines/setup_vllm_cpu.sh VENV"
    driver: ClassVar[str] = "hsformat_extractors.probes.vllm:VllmDriver"

    def environment(self) -> dict[str, str]:
        """Return what keeps vLLM in one process, off the network, and small.

        Its latent attention on a CPU has blocks of 16, that of a draft of 32: "No common block size" (0.32.0). The
        layers of a target that are captured are the same with plain attention.
        """
        import torch

        cpu = {} if torch.cuda.is_available() else {"VLLM_MLA_DISABLE": "1"}
        return {
            **cpu,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }


class VllmDriver:
    """Serves drafts in this process, or in forks of it. See :class:`~hsformat_extractors.probes.serve.Forking`."""

    def prepare(self) -> bool:
        """Import, where there is no GPU, what all jobs need (16 s of CPU time), and let it be forked.

        An engine that fails then takes nothing with it. CUDA does not survive a fork.
        """
        import torch

        if torch.cuda.is_available():
            return False
        for name in ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
            importlib.import_module(name)
        return True

    def serve(self, job: Job) -> None:
        """Generate three tokens with the draft, while the modules of this process are watched."""
        from vllm import LLM, SamplingParams

        from hsformat_extractors.probes.watch import watching

        engine: Any = LLM(
            model=job.target,
            dtype=job.dtype,
            seed=0,
            max_model_len=64,
            max_num_seqs=2,
            enforce_eager=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.2,
            speculative_config={"method": "eagle3", "model": job.draft, "num_speculative_tokens": 2},
        )
        try:
            with watching(job):
                greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
                engine.generate({"prompt_token_ids": list(job.prompt)}, greedy, use_tqdm=False)
        finally:
            del engine
            gc.collect()
