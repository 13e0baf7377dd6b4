"""Extract hidden states of a model with vLLM into a store, with the Python API.

VENV/bin/python examples/extract_vllm.py --model build/demo/target --data examples/data/demo_prompts.jsonl \
    --out build/example-vllm.hs.zarr

In an environment that has vLLM and hsformat; without a GPU, scripts/engines/setup_vllm_cpu.sh VENV makes one. The same
as ``hsformat extract --engine vllm --layers eagle3 --last pre --generate 32``: vLLM answers each prompt and gives the
states of all tokens in the same pass, depths 2, N//2, N-3 and N; the answers alone are supervised. Run it again and
nothing is done twice. ``--server http://HOST:8000 --storage FOLDER`` uses a server that was started as
``python -m hsformat_extractors.hosted.vllm_serve`` prints.
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
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices that share one copy of the target")
    parser.add_argument("--server", help="URL of a vLLM server, in place of an engine of this run's own")
    parser.add_argument("--storage", help="folder of the server's files, as it is seen from here")
    args = parser.parse_args()
    options = {"tensor_parallel": str(args.tensor_parallel)}
    if args.server:
        options = {"server": args.server, **({"storage": args.storage} if args.storage else {})}

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
    request = ExtractionRequest(
        model=args.model,
        target=target.model,
        captures=contract.captures,
        generation=Generation(mode="greedy", max_new_tokens=NEW_TOKENS),
        batch_tokens=4096,
        options=options,
    )
    extractor = find_extractor("vllm")
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
