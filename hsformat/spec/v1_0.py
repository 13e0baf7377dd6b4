"""Spec 1.0: what is generated from the models and the code table, so that no fact is written twice.

The examples of the codes are data beside this module (``examples.json``), which ``hsformat.testing.examples`` makes by
running them. May import ``contract`` and ``problems``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from hsformat.contract import Contract
from hsformat.problems import CODES

__all__ = ["EXAMPLES", "Example", "Rule", "contract_schema", "problem_example", "problems_document", "rules"]

EXAMPLES = Path(__file__).with_name("examples.json")

_RULE = re.compile(
    r"^- \*\*(?P<id>[A-Z]-[0-9]+)(?: \((?P<level>MUST|SHOULD), (?P<code>HS[0-9]{3})\))?\*\*", re.MULTILINE
)

_FAMILIES = {
    "1": "records",
    "2": "numbers",
    "3": "the target",
    "4": "serving",
    "5": "stores",
    "6": "foreign files",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A numbered rule of the specification: its id, level and the code of a breach; None: no check applies."""

    id: str
    level: str | None
    code: str | None


def rules(spec_text: str) -> Iterator[Rule]:
    """Yield the rules of a specification's Markdown text, in their order."""
    for m in _RULE.finditer(spec_text):
        yield Rule(id=m["id"], level=m["level"], code=m["code"])


def contract_schema() -> str:
    """Return the JSON Schema (draft 2020-12) of a contract, as it is committed in docs/spec."""
    schema = Contract.model_json_schema(mode="validation")
    schema["$schema"] = GenerateJsonSchema.schema_dialect
    schema["title"] = "hsformat contract 1.0"
    return f"{json.dumps(_one_form(schema), indent=2, ensure_ascii=False)}\n"


def _one_form(schema: Any) -> Any:
    """Return a schema in the form of newer versions of pydantic: older ones write 0.0, and an enum beside a const."""
    if isinstance(schema, list):
        return [_one_form(v) for v in schema]
    if isinstance(schema, dict):
        twice = "const" in schema and schema.get("enum") == [schema["const"]]
        return {k: _one_form(v) for k, v in schema.items() if not (twice and k == "enum")}
    return int(schema) if isinstance(schema, float) and schema.is_integer() else schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Lines of Python that end in a problem of some code, and the text of what they gave."""

    source: str
    problems: str


def problem_example(code: str) -> Example | None:
    """Return the example of a problem code; None: nothing reports this code yet."""
    return _examples(EXAMPLES.read_text("utf-8"))[1].get(code)


@cache
def _examples(text: str) -> tuple[str, dict[str, Example]]:
    """Return the lines that all examples begin with, and the examples by code."""
    data: dict[str, Any] = json.loads(text)
    return data["preamble"], {code: Example(**e) for code, e in data["examples"].items()}


def problems_document(examples: str | None = None) -> str:
    """Return docs/problems.md: every code, what it means, why it matters, what to do, and an example.

    Parameters
    ----------
    examples
        The text of ``examples.json``; None: as it is on the disk.
    """
    preamble, by_code = _examples(EXAMPLES.read_text("utf-8") if examples is None else examples)
    lines = [
        "# Problem codes",
        "",
        "Generated from `hsformat/problems.py` by `make docs`. `hsformat explain HS101` prints one of them.",
        "",
        "Severity is what a code is by default. Exit codes: 0 without errors, 1 with an error, 2 when the job could",
        "not be done (" + ", ".join(c.code for c in CODES.values() if c.unable) + ").",
        "",
        "Each example is run by `make docs`, in an empty folder, and what it gave stands below it (of more than two",
        "problems the first; `<writer>` is a name that is new each time). All begin with these lines:",
        "",
        "```python",
        preamble,
        "```",
    ]
    infos = list(CODES.values())
    for before, info in pairwise([None, *infos]):
        if info is None:
            continue
        if before is None or before.code[2] != info.code[2]:
            lines += ["", f"## {info.code[2]}xx: {_FAMILIES[info.code[2]]}"]
        lines += [
            "",
            f"### {info.code} {info.name}",
            "",
            f"{info.meaning} ({info.severity.value})",
            "",
            f"- Why it matters: {info.why}",
            f"- What to do: {info.fix}",
        ]
        example = by_code.get(info.code)
        if example is None:
            lines += ["", "No example: nothing in this version of hsformat reports this code."]
        else:
            lines += ["", "```python", example.source, "```", "", "```text", example.problems, "```"]
    return "\n".join(lines) + "\n"
