"""``hsformat estimate``: what a run will take, before it and without the target's weights.

This module counts; ``estimate_report`` says what comes out. May import everything below ``cli``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hsformat.cli import options as shared
from hsformat.cli.options import Codec, Dtype, Format, Last, json_object
from hsformat.cli.output import echo_problems, json_errors
from hsformat.problems import ForeignFileError, Problem, Severity, exit_code

if TYPE_CHECKING:
    from hsformat.cli.preparing import PreparationOptions
    from hsformat.extraction.space import Needs
    from hsformat.prepare import Summary
    from hsformat.store import Store
    from hsformat.store.arrays import Dimensions
    from hsformat.store.size import Plan
    from hsformat.target.operations import ForwardCost

__all__ = ["Found", "estimate"]

_MIB = 1024 * 1024
_ID = "c-" + "0" * 16
"""As preparation names a row that has no id of its own."""


def estimate(
    data: Annotated[Path | None, shared.DATA] = None,
    model: Annotated[Path | None, shared.MODEL] = None,
    out: Annotated[str | None, typer.Option(help="Store that would be written: how much is free there?")] = None,
    layers: Annotated[str | None, shared.LAYERS] = None,
    last: Annotated[Last, shared.LAST] = Last.PRE,
    generate: Annotated[int, shared.GENERATE] = 0,
    codec: Annotated[Codec, shared.CODEC] = Codec.COMPACT,
    dtype: Annotated[Dtype | None, shared.DTYPE] = None,
    max_length: Annotated[int | None, shared.MAX_LENGTH] = None,
    segment_mib: Annotated[int, shared.SEGMENT_MIB] = 4096,
    commit_seconds: Annotated[float, shared.COMMIT_SECONDS] = 120.0,
    template_kwargs: Annotated[str, shared.TEMPLATE_KWARGS] = "{}",
    explode_turns: Annotated[bool, shared.EXPLODE_TURNS] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Without --data: tokens of all records (of their prompts).", min=1)
    ] = None,
    records: Annotated[int | None, typer.Option(help="Records that --tokens are in; default: 1.", min=1)] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Without --model: width of the states.", min=1)] = None,
    captures: Annotated[
        int | None, typer.Option(help="Without --model: states a token, the last one included.", min=1, max=1000)
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Rate of the run, as the progress of a short one shows it.", min=1e-9)
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="10^12 operations that the engine sustains in a second, for the time.", min=1e-9),
    ] = None,
    format: Annotated[Format, typer.Option(help="text, or JSON alone on stdout.")] = Format.TEXT,
) -> None:
    """Say what a run will take, before it and without the target's weights: tokens, bytes, files, free space, time.

    Counted from the data (--data, --model, --layers), or from numbers alone (--tokens, and --model with --layers or
    --hidden-size, --captures and --dtype). Exit code 1 where extract would refuse the data or the disk.
    """
    _check_options(data, model, layers, tokens=tokens, records=records, hidden_size=hidden_size, captures=captures)
    kwargs = json_object("--template-kwargs", template_kwargs)
    if tflops is not None and model is None:
        raise typer.BadParameter("the target's config says what a token takes", param_hint="--model")
    if data is None and (max_length is not None or explode_turns or kwargs):
        raise typer.BadParameter("says how data is prepared, and there is none", param_hint="--data")
    with json_errors(wanted=format is Format.JSON):
        from hsformat.cli.estimate_report import report_facts, report_lines
        from hsformat.cli.preparing import PreparationOptions
        from hsformat.extraction.space import Needs
        from hsformat.store.size import Plan

        dimensions = _dimensions(model, layers, last, dtype, codec, hidden_size=hidden_size, captures=captures)
        found = Found(
            dimensions=dimensions,
            plan=Plan(dimensions, segment_bytes=segment_mib * _MIB),
            needs=Needs(dimensions, max_new_tokens=generate),
            generate=generate,
            cost=_cost(model),
        )
        if data is not None and model is not None:
            preparation = PreparationOptions(
                data=data,
                generate=generate,
                max_length=max_length,
                explode_turns=explode_turns,
                template_kwargs=kwargs,
            )
            found.stored = _stored(out)
            found.add_data(preparation, model)
        elif tokens is not None:
            _check_place(out)
            found.add_numbers(tokens, records or 1)
        problems = found.problems(out)
        facts = report_facts(found, out, segment_mib=segment_mib, commit_seconds=commit_seconds, rate=tokens_per_second,
                             tflops=tflops)  # fmt: skip
    if format is Format.JSON:
        report = {**facts, "problems": [p.to_dict() for p in problems], "exit_code": int(exit_code(problems))}
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        echo_problems((p for p in problems if p.severity is not Severity.NOTE), err=True)
        for line in (*(found.summary.lines() if found.summary else ()), *report_lines(facts)):
            typer.echo(line)
    raise typer.Exit(exit_code(problems))


def _check_options(
    data: Path | None,
    model: Path | None,
    layers: str | None,
    *,
    tokens: int | None,
    records: int | None,
    hidden_size: int | None,
    captures: int | None,
) -> None:
    """Refuse, with exit code 2, options that say one thing twice or leave one out."""
    if (data is None) == (tokens is None):
        raise typer.BadParameter("give either --data or --tokens", param_hint="--data")
    if records is not None and (tokens is None or records > tokens):
        raise typer.BadParameter("goes with --tokens, of which each record has one at least", param_hint="--records")
    if model is None and (data is not None or hidden_size is None or captures is None):
        what = "the target's tokenizer is needed" if data else "give it with --layers, or --hidden-size and --captures"
        raise typer.BadParameter(what, param_hint="--model")
    if model is not None and (hidden_size is not None or captures is not None):
        hint = "--hidden-size" if hidden_size is not None else "--captures"
        raise typer.BadParameter("follows from --model and --layers", param_hint=hint)
    if (model is None) != (layers is None):
        raise typer.BadParameter("goes with --model, and it with --layers", param_hint="--layers")


def _dimensions(
    model: Path | None,
    layers: str | None,
    last: Last,
    dtype: Dtype | None,
    codec: Codec,
    *,
    hidden_size: int | None,
    captures: int | None,
) -> Dimensions:
    """Return what decides the arrays, from the target's config or from numbers."""
    from hsformat.contract import Capture
    from hsformat.extraction.plan import make_captures, parse_layers
    from hsformat.store.arrays import Dimensions
    from hsformat.target.config import read_config
    from hsformat.target.describe import run_dtype

    if model is None or layers is None:
        if dtype is None:
            raise typer.BadParameter("needed where there is no --model that says it", param_hint="--dtype")
        made = tuple(Capture(depth=d + 1, norm="none", dtype=dtype.value) for d in range(captures or 0))
        return Dimensions(hidden_size=hidden_size or 0, captures=made, codec=codec.value, target_dtype=dtype.value)
    config, problems = read_config(model), list[Problem]()
    run_in = run_dtype(config, None if dtype is None else dtype.value, problems)
    if problems:
        raise ForeignFileError(problems)
    n = config.values["num_hidden_layers"]
    return Dimensions(
        hidden_size=config.values["hidden_size"],
        captures=make_captures(n, parse_layers(layers, n), last.value, run_in),
        codec=codec.value,
        target_dtype=run_in,
    )


def _cost(model: Path | None) -> ForwardCost | str:
    """Return what a forward pass takes, or why that is not known."""
    from hsformat.target.config import read_config
    from hsformat.target.operations import forward_cost

    return "without --model nothing says what a token takes" if model is None else forward_cost(read_config(model))


def _stored(out: str | None) -> Store | None:
    """Return the store that a run would go on with, if there is one; HS501 where something else is there."""
    from hsformat.cli.info import open_to_describe
    from hsformat.store import check_new, exists

    if out is not None and exists(out):
        stored: Store = open_to_describe(out)
        return stored
    if out is not None:
        check_new(out)
    return None


def _check_place(out: str | None) -> None:
    """Refuse (HS501) what extract would refuse to write to, without a request to an object store."""
    from hsformat.store.places import free_bytes

    if out is not None and free_bytes(out) is not None:
        _stored(out)


@dataclass(kw_only=True)
class Found:
    """What is counted.

    Attributes
    ----------
    generate
        Tokens that each answer may have.
    cost, operations
        What a forward pass takes, or why that is not known; and of all that is counted.
    stored
        The store that a run would go on with.
    there
        Samples whose record it has.
    summary
        Of the preparation; None: from numbers.
    """

    dimensions: Dimensions
    plan: Plan
    needs: Needs
    generate: int
    cost: ForwardCost | str
    operations: int = 0
    stored: Store | None = None
    there: int = 0
    summary: Summary | None = None

    def add_data(self, preparation: PreparationOptions, model: Path) -> None:
        """Prepare everything, as a run does, and count it."""
        from hsformat.cli.preparing import preparation_progress
        from hsformat.prepare import count_rows, load_tokenizer
        from hsformat.store.size import PlannedRecord
        from hsformat.target.config import read_config

        rows = count_rows(preparation.data)
        samples = preparation.samples_of_config(load_tokenizer(model), read_config(model))
        with preparation_progress(rows) as listener:
            for sample in samples:
                if self.stored is not None and sample.id in self.stored:
                    self.there += 1
                else:
                    n = len(sample) + self.generate
                    self.needs.add(sample)
                    self.plan.add(PlannedRecord(sample.id, n, n))
                    self._add_operations(n)
                listener(samples.summary)
        self.summary = samples.summary

    def add_numbers(self, tokens: int, records: int) -> None:
        """Count so many tokens, spread evenly over so many records."""
        from hsformat.store.size import PlannedRecord

        self.needs.add_numbers(samples=records, tokens=tokens)
        each, longer = divmod(tokens, records)
        for length, times in ((each + 1, longer), (each, records - longer)):
            n = length + self.generate
            self.plan.add(PlannedRecord(_ID, n, n), times=times)
            self._add_operations(n, times=times)

    def _add_operations(self, tokens: int, *, times: int = 1) -> None:
        if not isinstance(self.cost, str):
            self.operations += times * self.cost.operations(tokens, written=self.generate)

    def problems(self, out: str | None) -> list[Problem]:
        """Return what extract would say about the data, and about the disk of ``out``."""
        from hsformat.extraction.space import space_problems
        from hsformat.store.places import free_bytes

        found = [] if self.summary is None else self.summary.all_problems
        free = None if out is None else free_bytes(out)
        return found if out is None or free is None else [*found, *space_problems(out, free, self.needs)]
