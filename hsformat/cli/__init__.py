"""The ``hsformat`` command line: ``commands`` gathers the commands, one module each.

Importing it costs next to nothing, so that Ctrl-C in the first second, while libraries load, ends as it should.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        from hsformat.cli.commands import app
        from hsformat.cli.output import guarded

        code = guarded(app)
    except KeyboardInterrupt:
        print("hsformat: stopped", file=sys.stderr)
        code = 130
    sys.exit(code)
