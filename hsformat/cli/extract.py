"""``hsformat extract``: real states of a real model into a store. Composes target, prepare and extraction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hsformat.cli import options as shared
from hsformat.cli.options import Codec, Dtype, Format, Last, json_object, parse_options
from hsformat.cli.output import echo_problems, human_bytes, json_errors
from hsformat.problems import Problem, ResolveError, Severity, StoreError, exit_code

if TYPE_CHECKING:
    from hsformat.cli.preparing import PreparationOptions
    from hsformat.extraction import ExtractionReport, Extractor
    from hsformat.extraction.driver import Listener
    from hsformat.target import TargetDescription

__all__ = ["extract"]

_MIB = 1024 * 1024


def extract(
    model: Annotated[Path, shared.MODEL],
    data: Annotated[Path, shared.DATA],
    out: Annotated[
        str | None,
        typer.Option(help="Store to write, path or address; one begun by the same command is continued."),
    ] = None,
    layers: Annotated[str | None, shared.LAYERS] = None,
    engine: Annotated[str, typer.Option(help="Name of an installed extractor.")] = "transformers",
    last: Annotated[Last, shared.LAST] = Last.PRE,
    generate: Annotated[int, shared.GENERATE] = 0,
    temperature: Annotated[float, typer.Option(help="Sample at this temperature; 0: greedy.", min=0)] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of sampling.", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of tokens to sample from.", min=1)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; required with a temperature.", min=0, max=2**53 - 1)
    ] = None,
    codec: Annotated[Codec, shared.CODEC] = Codec.COMPACT,
    dtype: Annotated[Dtype | None, shared.DTYPE] = None,
    max_length: Annotated[int | None, shared.MAX_LENGTH] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a forward pass, padding included.", min=1)] = 4096,
    segment_mib: Annotated[int, shared.SEGMENT_MIB] = 4096,
    commit_seconds: Annotated[float, shared.COMMIT_SECONDS] = 120.0,
    template_kwargs: Annotated[str, shared.TEMPLATE_KWARGS] = "{}",
    explode_turns: Annotated[bool, shared.EXPLODE_TURNS] = False,
    ignore_disk_space: Annotated[
        bool,
        typer.Option("--ignore-disk-space", help="Go on where the disk seems too small: it may compress or grow."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare the data and show it; load no engine, write nothing.")
    ] = False,
    weights_digest: Annotated[bool, typer.Option("--weights-digest", help="Hash all weight files.")] = False,
    option: Annotated[list[str] | None, typer.Option(help="Option of the engine, NAME=VALUE (device=cuda:0).")] = None,
    format: Annotated[Format, typer.Option(help="Of the summary; JSON stands alone on stdout.")] = Format.TEXT,
) -> None:
    """Extract hidden states of conversations into a store, and go on where an earlier run stopped."""
    from hsformat.cli.progress import extraction_progress
    from hsformat.extraction import ExtractionRequest, extract_to_store, find_extractor, make_contract
    from hsformat.extraction.plan import parse_layers
    from hsformat.extraction.registry import isolated
    from hsformat.prepare import count_rows, load_tokenizer

    generation = _generation(generate, temperature, top_p, top_k, seed)
    preparation = _preparation(data, generate, max_length, template_kwargs, explode_turns=explode_turns)
    options = parse_options("--option", option or ())
    with json_errors(wanted=format is Format.JSON):
        if dry_run:
            _dry_run(model, preparation, layers, format)
        if out is None or layers is None:
            raise typer.BadParameter("required, unless --dry-run is given", param_hint="--layers" if out else "--out")
        extractor = find_extractor(engine)
        rows = count_rows(data)
        described = _describe(model, extractor, options, dtype=dtype, weights_digest=weights_digest)
        contract = make_contract(
            described.model,
            tokenizer_digest=described.tokenizer_digest,
            aux=parse_layers(layers, described.model.num_layers),
            last=last.value,
            codec=codec.value,
        )
        request = ExtractionRequest(
            model=model,
            target=described.model,
            captures=contract.captures,
            generation=generation,
            batch_tokens=batch_tokens,
            options=options,
        )
        with isolated(extractor):
            problems = extractor.preflight(request)
        if exit_code(problems):
            raise ResolveError(problems)
        echo_problems(problems, err=True)
        samples = preparation.samples(
            load_tokenizer(model), vocab_size=described.model.vocab_size, max_positions=described.max_positions
        )
        with extraction_progress(rows, lambda: samples.summary.rows_dropped) as progress, _how_to_go_on(out):
            listener = _AtOnce(progress)
            report = extract_to_store(
                extractor,
                samples,
                request=request,
                contract=contract,
                out=out,
                segment_bytes=segment_mib * _MIB,
                commit_seconds=commit_seconds,
                ignore_disk_space=ignore_disk_space,
                listener=listener,
            )
    _finish(report, samples.summary, out, format, shown=listener.shown)


class _AtOnce:
    """Passes progress on, and prints the problems that a run begins with when it begins."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.shown = 0

    def __call__(self, report: ExtractionReport) -> None:
        if not report.written and len(report.problems) > self.shown:
            echo_problems(_worth_showing(report.problems[self.shown :]), err=True)
            self.shown = len(report.problems)
        self._listener(report)


def _preparation(
    data: Path, generate: int, max_length: int | None, template_kwargs: str, *, explode_turns: bool
) -> PreparationOptions:
    from hsformat.cli.preparing import PreparationOptions

    return PreparationOptions(
        data=data,
        generate=generate,
        max_length=max_length,
        explode_turns=explode_turns,
        template_kwargs=json_object("--template-kwargs", template_kwargs),
    )


def _dry_run(model: Path, preparation: PreparationOptions, layers: str | None, format: Format) -> NoReturn:
    """Prepare as the real run does, from the target's config and tokenizer alone."""
    from hsformat.cli.dryrun import run_dry
    from hsformat.extraction.plan import parse_layers
    from hsformat.prepare import count_rows, load_tokenizer
    from hsformat.target.config import read_config

    rows, config = count_rows(preparation.data), read_config(model)
    if layers is not None:
        parse_layers(layers, config.values["num_hidden_layers"])
    tokenizer = load_tokenizer(model)
    run_dry(preparation.samples_of_config(tokenizer, config), tokenizer, rows, format)


def _describe(
    model: Path, extractor: Extractor, options: Mapping[str, str], *, dtype: str | None, weights_digest: bool
) -> TargetDescription:
    """Describe the target; where its family is not in the table, let the extractor measure what the table would say."""
    from hsformat.extraction.protocol import Measures
    from hsformat.extraction.registry import isolated
    from hsformat.target.describe import UnknownFamily, describe

    try:
        return describe(model, dtype=dtype, weights_digest=weights_digest)
    except UnknownFamily as e:
        if not isinstance(extractor, Measures):
            raise
        what = f"model_type {e.model_type!r} is not in the table"
    typer.echo(f"extract: {what}: measuring its norm, scales and cap by running it once", err=True)
    with isolated(extractor):
        measured = extractor.measure(model, options=options)
    return describe(model, dtype=dtype, weights_digest=weights_digest, measured=measured)


@contextmanager
def _how_to_go_on(out: str) -> Iterator[None]:
    """After a failed write or a signal say that the same command continues; what was committed is whole."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            "extract: stopped at once; what is committed stays, and the same command goes on from there", err=True
        )
        raise
    except StoreError:
        from hsformat.store import exists

        if exists(out):
            typer.echo(f"extract: what is committed in {out} stays; then give the same command again", err=True)
        raise


def _worth_showing(problems: Iterable[Problem]) -> Iterator[Problem]:
    return (p for p in problems if p.severity is not Severity.NOTE)


def _finish(report: ExtractionReport, summary: Any, out: str, format: Format, *, shown: int) -> None:
    problems = [*summary.all_problems, *report.problems]
    code = max(report.exit_code, exit_code(problems))
    if format is Format.JSON:
        facts = {
            "store": out,
            "written": report.written,
            "skipped": report.skipped,
            "tokens": report.tokens,
            "bytes": report.nbytes,
            "seconds": round(report.seconds, 3),
            "quarantined": dict(report.quarantined),
            "quarantine_file": str(report.quarantine_path) if report.quarantine_path else None,
            "interrupted": report.interrupted.name if report.interrupted else None,
            "preparation": summary.to_dict(),
            "problems": [p.to_dict() for p in problems],
            "exit_code": code,
        }
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        raise typer.Exit(code)
    echo_problems(_worth_showing([*summary.all_problems, *report.problems[shown:]]), err=True)
    for line in summary.lines():
        typer.echo(line)
    typer.echo(
        f"extract: {report.written:,} records written ({report.tokens:,} tokens, {human_bytes(report.nbytes)} of "
        f"states) in {report.seconds:.1f} s, {report.skipped:,} were there already: {out}"
    )
    if report.quarantined:
        reasons = ", ".join(f"{n} {c}" for c, n in sorted(report.quarantined.items()))
        typer.echo(
            f"extract: {report.quarantined.total():,} quarantined ({reasons}): {report.quarantine_path}", err=True
        )
    if report.interrupted is not None:
        typer.echo(
            f"extract: stopped by {report.interrupted.name}; what is whole is committed, and the same command goes on "
            "from there",
            err=True,
        )
    raise typer.Exit(code)


def _generation(n: int, temperature: float, top_p: float | None, top_k: int | None, seed: int | None) -> Any:
    from pydantic import ValidationError

    from hsformat.record import Generation

    if not n:
        if temperature or top_p is not None or top_k is not None or seed is not None:
            raise typer.BadParameter("sampling options go with --generate N", param_hint="--generate")
        return Generation(mode="none")
    if not temperature:
        if top_p is not None or top_k is not None or seed is not None:
            raise typer.BadParameter("--top-p, --top-k and --seed go with a temperature", param_hint="--temperature")
        return Generation(mode="greedy", max_new_tokens=n)
    if seed is None:
        raise typer.BadParameter("sampling needs a seed, so that the run can be repeated", param_hint="--seed")
    try:
        return Generation(
            mode="sampled", max_new_tokens=n, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
    except ValidationError as e:
        (first, *_) = e.errors(include_url=False)
        name = str(first["loc"][0]).replace("_", "-")
        raise typer.BadParameter(f"{first['input']!r}: {first['msg']}", param_hint=f"--{name}") from e
