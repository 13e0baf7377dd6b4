"""``hsformat info STORE``: what a store holds, one line a capture. May import ``store`` and ``engines``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer

from hsformat.cli.options import Format
from hsformat.cli.output import echo_problems, human_bytes, json_errors
from hsformat.contract import Contract
from hsformat.printable import printable
from hsformat.problems import ResolveError, exit_code

__all__ = ["info", "open_to_describe"]


def info(
    store: Annotated[str, typer.Argument(help="Path or address of a store.")],
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Show what a store holds: target, records, layout, and each capture with its number in every engine."""
    with json_errors(wanted=format is Format.JSON):
        opened = open_to_describe(store)
        facts = _facts(opened)
    code = exit_code(opened.problems)
    if format is Format.JSON:
        typer.echo(json.dumps({**facts, "exit_code": code}, indent=2, ensure_ascii=False))
    else:
        typer.echo(_text(facts))
        echo_problems(opened.problems)
    raise typer.Exit(code)


def open_to_describe(path: str) -> Any:
    """Open a store to describe it: every declared field is understood, and damaged segments are reported."""
    from hsformat.store import open as open_store
    from hsformat.store.metadata import load_contract
    from hsformat.store.places import backend_for

    contract, _ = load_contract(backend_for(path))
    return open_store(path, understands=[f.name for f in contract.fields], damaged="skip")


def _facts(store: Any) -> dict[str, Any]:
    contract: Contract = store.contract
    generation: Counter[str] = Counter()
    templates: Counter[str] = Counter()
    for segment in store.segments:
        for provenance in segment.provenances:
            g = provenance.generation
            shown = {k: v for k, v in g.model_dump().items() if k != "mode" and v is not None}
            generation[g.mode + "".join(f", {k} {v}" for k, v in shown.items())] += 1
            templates[str(provenance.template_digest or "none")] += 1
    return {
        "path": str(store.path),
        "contract": contract.to_json(),
        "digest": contract.digest,
        "compatibility_digest": contract.compatibility_digest,
        "records": len(store),
        "segments": len(store.segments),
        "tokens": store.tokens,
        "bytes": store.nbytes,
        "generation": dict(generation),
        "templates": dict(templates),
        "producers": sorted({json.dumps(s.producer, sort_keys=True) for s in store.segments}),
        "captures": [_capture(contract, key) for key in contract.keys],
        "numbers_of": _numbers_of(contract.target.architecture),
        "problems": [p.to_dict() for p in store.problems],
    }


def _numbers_of(architecture: str) -> dict[str, str]:
    """Return by engine what its numbers hold for: title and versions, or that they are unknown."""
    from hsformat.engines import ENGINES, numbering_row
    from hsformat.engines.words import versions_text

    out = {}
    for name, engine in ENGINES.items():
        try:
            row = numbering_row(name, architecture)
        except ResolveError:
            out[name] = f"{engine.title}: unknown for {architecture}"
        else:
            out[name] = f"{engine.title} {versions_text(name, row.versions)}"
    return out


def _capture(contract: Contract, key: str) -> dict[str, Any]:
    from hsformat.engines import ENGINES, describe_capture, engine_number

    n, architecture = contract.target.num_layers, contract.target.architecture
    numbers, remarks = {}, []
    for name, engine in ENGINES.items():
        try:
            found = engine_number(name, architecture, n, key)
        except ResolveError:
            numbers[name] = f"{engine.title} unknown"
            continue
        numbers[name] = f"{engine.title} {'none' if found.number is None else found.text}"
        if found.number is None:
            remarks.append(f"{engine.title} has no number for {key}: {found.text.removeprefix('none: ')}")
    return {
        "key": key,
        "meaning": describe_capture(key, n),
        "dtype": contract.capture(key).dtype,
        "numbers": numbers,
        "remarks": remarks,
    }


def _text(facts: dict[str, Any]) -> str:
    contract = facts["contract"]
    target, layout = contract["target"], contract["layout"]
    quant = target["quantization"] or "not quantised"
    lines = [
        f"{facts['path']}: hsformat store, spec {contract['spec_version']}",
        f"  target      {target['name']}{' @ ' + target['revision'] if target['revision'] else ''}: "
        f"{target['architecture']}, {target['num_layers']} layers, hidden {target['hidden_size']}, "
        f"vocabulary {target['vocab_size']}, {target['dtype']}, {quant}",
        f"  records     {facts['records']:,}, segments {facts['segments']:,}, {facts['tokens']:,} tokens, "
        f"{human_bytes(facts['bytes'])} on disk, codec {contract['codec']}",
        f"  layout      aux [{', '.join(layout['aux'])}], last {layout['last'] or 'none'}",
    ]
    lines += [f"  generation  {k}: {v:,} records" for k, v in facts["generation"].items()]
    lines += [f"  template    {k}: {v:,} records" for k, v in facts["templates"].items()]
    for name in ("generation", "templates"):
        if len(facts[name]) > 1:
            lines.append(f"  mixed       records of {len(facts[name])} kinds of {name}")
    lines += [f"  fields      {f['name']}: {f['dtype']} a {f['axis']}" for f in contract["fields"]]
    lines.append(f"  digest      {facts['digest']}")
    lines.append(f"  compatible  {facts['compatibility_digest']}")
    lines.append("  captures")
    rows = [[c["key"], c["meaning"], c["dtype"], *c["numbers"].values()] for c in facts["captures"]]
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines += ["    " + "  ".join(t.ljust(w) for t, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.append(f"    numbers as seen in {'; '.join(facts['numbers_of'].values())}")
    lines += [f"    {remark}" for c in facts["captures"] for remark in c["remarks"]]
    return "\n".join(map(printable, lines))
