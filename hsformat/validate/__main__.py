"""``python -m hsformat.validate STORE``: the same as ``hsformat validate STORE``."""

from __future__ import annotations

import typer

from hsformat.printable import accept_all_text
from hsformat.validate.command import validate

if __name__ == "__main__":
    accept_all_text()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(validate)
    app()
