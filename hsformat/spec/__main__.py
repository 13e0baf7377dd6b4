"""``python -m hsformat.spec``: write every generated document (run by ``make docs`` in a checkout)."""

from __future__ import annotations

from pathlib import Path

from hsformat.spec.v1_0 import contract_schema, problems_document


def documents() -> dict[Path, str]:
    """Return the text of every generated file by its path, relative to the checkout."""
    from hsformat.cli.reference import cli_document
    from hsformat.engines.document import engines_document
    from hsformat.testing.cases import case_files

    return {
        Path("docs/spec/1.0.schema.json"): contract_schema(),
        Path("docs/problems.md"): problems_document(),
        Path("docs/cli.md"): cli_document(),
        Path("docs/engines.md"): engines_document(),
        **case_files(),
    }


def main() -> None:
    """Write them below the working directory."""
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
