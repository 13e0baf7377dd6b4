"""``python -m hsformat.spec``: write every generated document (run by ``make docs`` in a checkout)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hsformat.spec.v1_0 import contract_schema, problems_document


def documents() -> dict[Path, Callable[[], str]]:
    """Return what makes the text of every generated file, by its path relative to the checkout."""
    from hsformat.cli.reference import cli_document
    from hsformat.engines.document import engines_document
    from hsformat.testing.cases import case_files
    from hsformat.testing.examples import FILE, examples_file

    return {
        Path("docs/spec/1.0.schema.json"): contract_schema,
        FILE: examples_file,
        Path("docs/problems.md"): lambda: problems_document(examples_file()),
        Path("docs/cli.md"): cli_document,
        Path("docs/engines.md"): engines_document,
        **{path: partial(str, text) for path, text in case_files().items()},
    }


def main() -> None:
    """Write them below the working directory."""
    for path, make in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
