"""``python -m hsformat.spec``: write the generated documents (run by ``make docs`` in a checkout)."""

from __future__ import annotations

from pathlib import Path

from hsformat.spec.v1_0 import contract_schema, problems_document


def main() -> None:
    """Write docs/spec/1.0.schema.json and docs/problems.md below the working directory."""
    docs = Path("docs")
    (docs / "spec" / "1.0.schema.json").write_text(contract_schema(), encoding="utf-8")
    (docs / "problems.md").write_text(problems_document(), encoding="utf-8")


if __name__ == "__main__":
    main()
