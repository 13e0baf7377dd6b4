"""Extract hidden states with SGLang, with the Python API.

python examples/extract_sglang.py --model build/demo/target --data examples/data/demo_prompts.jsonl \
    --out build/example-sglang.hs.zarr

In an environment with SGLang 0.5.23 or later; without a GPU: scripts/engines/setup_sglang_cpu.sh VENV. The same as
``hsformat extract --engine sglang --layers eagle3 --last pre --generate 32``: the target answers each prompt, its own
tokens alone are supervised, and the states of prompt and answer come from the pass that wrote it (a record of T tokens
has T - 1 states: the last token is never run). Run it again and nothing is done twice.

With ``--server http://127.0.0.1:30000`` a running server is asked, which was started with the flags that this prints:
``python -m hsformat_extractors.hosted.sglang_serve MODEL --layers 2,15,27 --last pre --staging FOLDER``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import hsformat as hs
from hsformat.extraction import ExtractionRequest, eagle3_depths, extract_to_store, find_extractor, make_contract
from hsformat.prepare import load_tokenizer, prepare
from hsformat.record import Generation

NEW_TOKENS = 32


def main() -> int:
    """Run the example; return 0 when every sample gave a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines with messages")
    parser.add_argument("--out", type=Path, required=True, help="store to write")
    parser.add_argument("--server", help="URL of a running server")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the target")
    args = parser.parse_args()

    # What the target is, read from its folder: no weight is loaded.
    target = hs.target.describe(args.model)
    contract = make_contract(
        target.model,
        tokenizer_digest=target.tokenizer_digest,
        aux=eagle3_depths(target.model.num_layers),
        last="pre",
        codec="compact",
    )
    # Prompts by the target's own chat template, as they will be served.
    samples = prepare(
        args.data,
        load_tokenizer(args.model),
        vocab_size=target.model.vocab_size,
        max_length=target.max_positions,
        for_generation=True,
        reserve=NEW_TOKENS,
    )
    options = {"tensor_parallel": str(args.tensor_parallel)} if args.server is None else {"server": args.server}
    request = ExtractionRequest(
        model=args.model,
        target=target.model,
        captures=contract.captures,
        generation=Generation(mode="greedy", max_new_tokens=NEW_TOKENS),
        batch_tokens=4096,
        options=options,
    )
    extractor = find_extractor("sglang")
    problems = extractor.preflight(request)
    for found in problems:
        print(found, file=sys.stderr)
    if any(p.severity is hs.Severity.ERROR for p in problems):
        return 1
    report = extract_to_store(extractor, samples, request=request, contract=contract, out=args.out)
    print(f"{report.written} written, {report.skipped} there already, {report.quarantined.total()} quarantined")
    for found in (problems := [*samples.summary.all_problems, *report.problems]):
        print(found, file=sys.stderr)
    if problems or report.exit_code:
        return 1

    store = hs.open(args.out)
    record = store[0]
    print(f"{len(store)} records; the first is {record!r}")
    print(f"supervised: tokens {record.loss_mask.nonzero()[0][[0, -1]].tolist()} of {record.num_tokens}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except hs.HsError as e:
        sys.exit(str(e))
