"""``python -m hsformat.validate STORE``: the same as ``hsformat validate STORE``."""

from __future__ import annotations

import typer

from hsformat.validate.command import validate

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(validate)
    app()
