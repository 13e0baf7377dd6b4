"""The commands of ``hsformat``, its own and those of plugins. Thin: each parses its options and calls the library.

Exit codes: 0 clean (notes and warnings allowed), 1 a problem of severity error, 2 could not do the job; 128 + n after
signal n. Bad input is a problem with a code, never a traceback.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hsformat.cli.engines import engines_app
from hsformat.cli.estimate import estimate
from hsformat.cli.explain import explain
from hsformat.cli.extract import extract
from hsformat.cli.gc import gc
from hsformat.cli.info import info
from hsformat.cli.layout import layout
from hsformat.cli.merge import merge
from hsformat.cli.plugins import is_broken, plugin_commands
from hsformat.cli.probe import probe
from hsformat.cli.repair import repair
from hsformat.validate.command import validate

__all__ = ["app"]

app = typer.Typer(
    name="hsformat",
    help="Versioned, validated hidden-state records for training EAGLE-3 draft heads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_OWN = (extract, estimate, validate, info, layout, merge, repair, gc, explain)
for command in _OWN:
    app.command()(command)
engines_app.command()(probe)
app.add_typer(engines_app, name="engines")
_ANY = {"ignore_unknown_options": True, "allow_extra_args": True}
for name, command in plugin_commands({"engines", *(c.__name__ for c in _OWN)}):
    # The message of a command that cannot be loaded comes whatever options it is given.
    app.command(name, context_settings=_ANY if is_broken(command) else None)(command)


def _version(shown: bool) -> None:
    if shown:
        from hsformat import __version__

        typer.echo(f"hsformat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Versioned, validated hidden-state records for training EAGLE-3 draft heads."""
