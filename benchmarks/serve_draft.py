"""What a real engine accepts of a draft: served greedily on prompts, to compare with the walk of ``hsformat train``.

    ENGINE_VENV/bin/python benchmarks/serve_draft.py --engine vllm --target MODEL --draft DRAFT --data FILE

Runs in the engine's environment (scripts/engines) and needs nothing of hsformat. ``FILE`` is JSON Lines with ``ids``
(prompt and answer), ``prompt_len`` and ``split``; the ``val`` ones are served. Each answer is as long as the recorded
one at most, so that engine and walk see the same tokens where the engine's greedy answers are the recorded ones; the
share of answers that are, is printed.

Acceptance length is 1 + accepted / drafts, vLLM's definition; SGLang counts drafts as verify steps (``spec_verify_ct``)
and accepted ones as ``spec_num_correct_drafts`` (managers/tokenizer_manager.py, 0.5.23).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def rows_of(data: Path, count: int | None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    return [r for r in rows if r["split"] == "val"][:count]


def serve_vllm(args: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[list[list[int]], int, int, list[int]]:
    """Return answers, rounds of drafting, accepted tokens, and those accepted by position."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model=str(args.target), dtype=args.dtype, enforce_eager=True, max_model_len=2048, max_num_seqs=16, seed=0,
        enable_prefix_caching=False, disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": str(args.draft), "num_speculative_tokens": args.steps},
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": r["ids"][: r["prompt_len"]]} for r in rows],
        [SamplingParams(temperature=0, max_tokens=len(r["ids"]) - r["prompt_len"]) for r in rows],
        use_tqdm=False,
    )
    told = {m.name: m for m in llm.get_metrics()}
    rounds = told["vllm:spec_decode_num_drafts"].value
    accepted = told["vllm:spec_decode_num_accepted_tokens"].value
    positions = told["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [list(o.outputs[0].token_ids) for o in outputs], rounds, accepted, list(positions)


def serve_sglang(args: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[list[list[int]], int, int, list[int]]:
    """As :func:`serve_vllm`; by position nothing is told."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    import sglang

    engine: Any = sglang.Engine(
        model_path=str(args.target), dtype=args.dtype, random_seed=0, device="cpu", speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(args.draft), speculative_num_steps=args.steps, speculative_eagle_topk=1,
        speculative_num_draft_tokens=args.steps + 1, disable_radix_cache=True, disable_cuda_graph=True,
        skip_server_warmup=True, sampling_backend="pytorch", grammar_backend="none", host="127.0.0.1",
        mem_fraction_static=0.3, max_total_tokens=16384, max_running_requests=16, log_level="error",
        prefill_attention_backend="intel_amx", decode_attention_backend="intel_amx",
    )  # fmt: skip
    try:
        outputs = engine.generate(
            input_ids=[r["ids"][: r["prompt_len"]] for r in rows],
            sampling_params=[{"temperature": 0, "max_new_tokens": len(r["ids"]) - r["prompt_len"]} for r in rows],
        )
    finally:
        engine.shutdown()
    told = [o["meta_info"] for o in outputs]
    rounds = sum(m["spec_verify_ct"] for m in told)
    return [o["output_ids"] for o in outputs], rounds, sum(m["spec_num_correct_drafts"] for m in told), []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3, help="tokens drafted a round")
    parser.add_argument("--records", type=int, help="so many prompts, for a try")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    rows = rows_of(args.data, args.records)
    answers, rounds, accepted, positions = (serve_vllm if args.engine == "vllm" else serve_sglang)(args, rows)
    same = sum(a == r["ids"][r["prompt_len"] :] for a, r in zip(answers, rows, strict=True))
    print(f"{len(rows)} prompts, {sum(map(len, answers))} tokens, {same} answers as recorded")
    print(f"{rounds} rounds, {accepted} drafted tokens accepted: acceptance length {1 + accepted / rounds:.3f}")
    if positions:
        print("accepted by position:", " ".join(f"{p / rounds:.3f}" for p in positions))


if __name__ == "__main__":
    main()
