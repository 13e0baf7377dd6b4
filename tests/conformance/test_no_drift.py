"""Facts that are written twice are compared here, so that two readings of one fact never drift apart.

Generated (``make docs``): the schema, docs/problems.md and its examples, docs/cli.md, the JSON cases. Compared: the
tables, lists and constants of the specification with the models and the code; digests of section 3 with a second
computation; README, CONTRIBUTING, docs, Makefile, pyproject.toml and ARCHITECTURE with the tree, the command line and
the import rules.
"""

from __future__ import annotations

import doctest
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import rfc8785
from factories import tiny_contract
from pydantic import BaseModel

import hsformat
from hsformat import align, checks, contract, digests, record, scan
from hsformat.cli.reference import cli_commands, cli_options
from hsformat.problems import CODES
from hsformat.spec.__main__ import documents
from hsformat.spec.v1_0 import rules
from hsformat.store import array_json, arrays, codec, commit, metadata
from hsformat.target import describe
from hsformat.testing import examples
from hsformat.testing.examples import EXAMPLES, NOT_REPORTED, examples_file

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/data/tiny-llama"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TEXTS = {
    str(p.relative_to(ROOT)): p.read_text("utf-8")
    for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile")
}
SPEC, README, MAKEFILE = TEXTS["docs/spec/1.0.md"], TEXTS["README.md"], TEXTS["Makefile"]
ARCHITECTURE = TEXTS["docs/ARCHITECTURE.md"]
SOURCES = {
    str(p.relative_to(ROOT)): p.read_text("utf-8")
    for folder in ("hsformat", "extractors", "examples", "benchmarks", "tests")
    for p in (ROOT / folder).rglob("*.py")
}


def rule_text(rule: str) -> str:
    """Return the text of one rule of the specification, on one line."""
    m = re.search(rf"^- \*\*{rule}(?: [^*]*)?\*\*(.*?)(?=^- \*\*|^\||^#|^```|\Z)", SPEC, re.M | re.S)
    assert m, rule
    return " ".join(m[1].split())


def table(first: str) -> dict[str, list[str]]:
    """Return the rows of the Markdown table whose head begins so, by the names in their first cell."""
    lines = SPEC.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    out: dict[str, list[str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [c.strip() for c in line.strip("|").split("|")]
        out |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells)
    return out


def ticked(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def braces(text: str) -> list[str]:
    """Return the member names of the first `{a, b}` or `{a: type, b: type}` of a text."""
    m = re.search(r"`\{(.*?)\}`", text)
    assert m, text
    return [part.split(":")[0].strip() for part in m[1].split(", ")]


def nullable(model: type[BaseModel], name: str) -> bool:
    return type(None) in get_args(get_type_hints(model)[name])


# Generated documents.


@pytest.mark.parametrize("path", documents(), ids=str)
def test_generated_documents_are_the_committed_ones(path):
    written, generated = (ROOT / path).read_text("utf-8"), documents()[path]()
    if path.suffix == ".json":  # pydantic 2.9 writes 0.0 for 0
        assert json.loads(written) == json.loads(generated), "run make docs"
    else:
        assert written == generated, "run make docs"


def test_every_code_that_is_reported_has_an_example_and_no_other():
    reported = {
        code
        for place, text in SOURCES.items()
        if place.startswith(("hsformat/", "extractors/"))
        and not place.startswith(("hsformat/testing/", "hsformat/spec/"))
        and place != "hsformat/problems.py"
        for code in re.findall(r'"(HS[0-9]{3})"', text)
    }
    assert set(EXAMPLES) == reported & set(CODES), "add an example to hsformat/testing/examples.py, and run make docs"
    assert set(NOT_REPORTED) == set(CODES) - reported


def test_examples_are_those_of_any_run():
    told = json.loads(examples_file())["examples"]
    for code in ("HS108", "HS203", "HS504"):  # with names of writers, random numbers, checksums
        assert examples._told(code) == told[code]["problems"]
        assert "<writer>-0" in told[code]["problems"]
    assert not re.search(r"/tmp|\b[0-9a-f]{20}\b|20[0-9]{2}-", examples_file())


def test_nothing_stale_lies_among_the_generated_cases():
    generated = {p.name for p in documents() if p.parent.name == "1.0"}
    assert {p.name for p in (ROOT / "docs/spec/cases/1.0").iterdir()} == {*generated, "README.md"}


# The specification and the models.


def test_the_target_table_is_the_model():
    rows = table("member of `target`")
    assert list(rows) == list(contract.TargetModel.model_fields)
    for name, (_, kind, _) in rows.items():
        assert ("or null" in re.sub(r"{.*}", "", kind)) == nullable(contract.TargetModel, name), name
        assert ("not empty" in kind) == (name in ("name", "architecture"))
        assert ("integer > 0" in kind.split("{")[0]) == (name in ("num_layers", "hidden_size", "vocab_size"))
    for name, model in (
        ("embedding", contract.Embedding),
        ("head", contract.Head),
        ("final_norm", contract.FinalNorm),
        ("rope", contract.Rope),
    ):
        assert braces(rows[name][1]) == list(model.model_fields), name
        for member in model.model_fields:
            kind = re.search(rf"\b{member}: ([^,}}]*)", rows[name][1])
            assert kind
            assert ("or null" in kind[1]) == nullable(model, member), (name, member)
    assert set(re.findall(r'"(\w+)"', rows["final_norm"][1])) == set(
        get_args(get_type_hints(contract.FinalNorm)["kind"])
    )


def test_the_commit_record_table_is_the_model():
    rows = table("member of the commit record")
    assert list(rows) == ["spec_version", *commit._CommitJson.model_fields, "checksum"]
    for name in commit._CommitJson.model_fields:
        alone = "null" in rows[name][1] and name != "source_digests"  # there, the entries may be null
        assert alone == nullable(commit._CommitJson, name), name
    assert braces(rows["files"][2]) == list(commit._FileJson.model_fields)
    sealed = commit.seal({"n": 1})
    assert sealed["checksum"] == digests.checksum(rfc8785.dumps({"n": 1}))


def test_the_provenance_table_is_the_model():
    rows = table("member")
    assert list(rows) == list(record.Provenance.model_fields)
    assert braces(rows["generation"][1]) == list(record.Generation.model_fields)
    assert "null" in rows["template_digest"][1]
    assert nullable(record.Provenance, "template_digest")
    modes = set(get_args(get_type_hints(record.Generation)["mode"]))
    assert modes == set(ticked(rows["generation"][1])) & {"none", "greedy", "sampled"}


@pytest.mark.parametrize(
    ("rule", "model"),
    [("C-4", contract.Capture), ("C-6", contract.Layout), ("C-10", contract.FieldSpec)],
)
def test_objects_of_the_contract_are_the_models(rule, model):
    assert braces(rule_text(rule)) == list(model.model_fields)


def test_lists_and_patterns_of_the_contract_are_those_of_the_models():
    assert ticked(rule_text("C-1").split(". ")[0]) == list(contract.Contract.model_fields)
    assert tuple(ticked(rule_text("C-4").split("`dtype` is ")[1])) == get_args(contract.StateDtype)
    assert tuple(ticked(rule_text("C-10").rpartition("one of ")[2])[0].split()) == get_args(contract.FieldDtype)
    codecs = get_args(get_type_hints(contract.Contract)["codec"])
    assert tuple(t.strip('"') for t in ticked(rule_text("C-9"))[1:]) == codecs
    assert f'"{contract.SPEC_VERSION}"' in rule_text("C-2")
    assert get_args(get_type_hints(contract.Contract)["positions"]) == ("1d",)
    assert '`"1d"`' in rule_text("C-8")
    pattern = contract.FieldSpec.model_json_schema()["properties"]["name"]["pattern"]
    assert pattern.strip("^$") in ticked(rule_text("C-10"))
    writer, number = (t for t in ticked(rule_text("S-3")) if t.startswith(("[", "0|")))
    assert metadata._SEGMENT_NAME.pattern == rf"({writer})-({number})\Z"


def test_root_attribute_has_the_members_of_its_rule():
    assert list(metadata.root_attribute(tiny_contract())) == ticked(rule_text("S-7"))


def test_compatibility_leaves_out_what_its_rule_says():
    data = tiny_contract().to_json()
    view = contract.compatibility_view(data)
    removed, of_target = re.split(r"and in `target`", rule_text("X-2").split(" are removed")[0])
    assert {*data} - {*view} == set(ticked(removed))
    assert {*data["target"]} - {*view["target"]} == set(ticked(of_target))


def test_numbers_of_the_rules_are_those_of_the_code():
    assert f"1 to {checks.MAX_ID_BYTES:,} bytes" in rule_text("R-8")
    assert scan.ZERO_ROW_SHARE == 1 / 100
    assert "100 z <= S" in rule_text("R-11")
    assert arrays.MAX_CHUNK_BYTES == 2**31 - 17
    assert "2^31 - 17" in rule_text("G-7")
    assert metadata.MAX_JSON_BYTES == array_json.MAX_CHUNKS == 2**24
    assert "2^24 bytes" in rule_text("S-1")
    assert "2^24 of them" in rule_text("G-7")
    longest = {c: codec.longest_chunk(0, c) for c in ("compact", "fast")}
    assert f"{longest['compact']} bytes for each (without `blosc` {longest['fast']})" in rule_text("G-13")
    assert "it SHOULD be {} to {}".format(*arrays._STATE_ROWS) in rule_text("G-7")
    assert f"of others {arrays._TOKEN_ROWS:,}" in rule_text("G-7")
    assert f"`{digests.checksum(b'')}`" in SPEC


def test_arrays_of_section_5_are_those_that_are_written():
    block = SPEC.split("## 5. Store")[1].split("```")[1]
    rows = dict(re.findall(r"^    ([\w/<>]+) +([\w']+(?: dtype)?) +\[", block, re.M))
    field = {"name": "w", "axis": "token", "dtype": "int8", "shape": [], "must_understand": False}
    specs = arrays.array_specs(tiny_contract(fields=[field]), tokens=1, states=1, records=1, id_bytes=1, positions=True)
    found = {re.sub(r"/\w+$", lambda m: "/<name>" if m[0] == "/w" else "/<key>", k): s for k, s in specs.items()}
    assert {*rows} == {*found}
    for name, kind in rows.items():
        assert kind in (found[name].dtype.name, "capture's dtype", "field's dtype"), name


def test_every_rule_and_code_that_is_cited_exists():
    known = {r.id for r in rules(SPEC)}
    for place, text in {**TEXTS, **SOURCES}.items():
        assert set(re.findall(r"\brules? ([A-Z]-[0-9]+)\b", text)) <= known, place
        if place != "tests/conformance/test_no_drift.py":
            assert set(re.findall(r"\bHS[0-9]{3}\b", text)) - {"HS999", "HS000"} <= set(CODES), place


def test_sections_that_are_cited_are_about_it():
    headings = dict(re.findall(r"^##+ ([0-9.]+?)\.? (.*)$", SPEC, re.M))
    for place, text in SOURCES.items():
        for number in re.findall(r"(?:1\.0\.md|spec),? \(?section ([0-9.]*[0-9])", text):
            assert number in headings, (place, number)
    assert headings["2"] == "Contract"  # contract.py
    assert headings["5"] == "Store"  # store/arrays.py


# Section 3, computed a second time from the specification's words.


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_basis_digest_is_that_of_section_3_2():
    raw = (TINY / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]

    def entry(name: str) -> dict[str, Any]:
        tensor = header[name]
        start, stop = tensor["data_offsets"]
        return {"dtype": tensor["dtype"], "shape": tensor["shape"], "bytes": sha(body[start:stop])}

    told = {
        "embedding": entry("model.embed_tokens.weight"),
        "final_norm": entry("model.norm.weight"),
        "final_norm_bias": None,
        "lm_head": entry("lm_head.weight"),
        "lm_head_bias": None,
    }
    section = SPEC.split("### 3.2")[1].split("### 3.3")[0]
    assert set(told) == set(re.findall(r"`(embedding|(?:final_norm|lm_head)(?:_bias)?)`", section))
    assert describe(TINY).model.basis_digest == sha(rfc8785.dumps(told))


def test_weights_digest_is_that_of_section_3_2():
    files = [["model.safetensors", sha((TINY / "model.safetensors").read_bytes())]]
    assert describe(TINY, weights_digest=True).model.weights_digest == sha(rfc8785.dumps(files))


def test_config_digest_is_that_of_section_3_1():
    described = describe(TINY)
    assert described.model.config_digest == sha(rfc8785.dumps(described.config))
    always = SPEC.split("7. Always present: ")[1].split("\n\n")[0]
    assert set(ticked(always)) <= set(described.config)
    assert described.config["rope"] == [r.model_dump() for r in described.model.rope]
    assert not [k for k, v in described.config.items() if k.startswith("_") or v is None or v == []]


def test_tokenizer_digest_is_that_of_section_3_3():
    told = json.loads((TINY / "tokenizer.json").read_bytes())
    section = SPEC.split("### 3.3")[1].split("## 4")[0]
    for name in re.search(r"without (.*?);", section)[1].replace("and", ",").split(","):
        told.pop(name.strip().strip("`"))
    model = told["model"]
    model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    told["model"] = {k: v for k, v in model.items() if v is not None and v is not False}
    assert describe(TINY).tokenizer_digest == sha(rfc8785.dumps(told))


# Code and its own documentation.


def test_mask_rules_are_the_table_of_their_module():
    rows = re.findall(r"^``(\w+)`` ", align.__doc__ or "", re.M)
    assert tuple(rows) == get_args(align.MaskRule)
    assert "The mask rule `serving`" in " ".join(SPEC.split())


def _or_needs_torch(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.needs("torch")) if name.startswith("hsformat.torch") else name


MODULES = sorted(
    m.name for m in pkgutil.walk_packages(hsformat.__path__, "hsformat.") if not m.name.endswith("__main__")
)


@pytest.mark.parametrize("name", [_or_needs_torch(name) for name in MODULES])
def test_examples_in_docstrings_are_true(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("package", [_or_needs_torch(f"hsformat.{p}") for p in ("store", "testing", "torch")])
def test_module_tables_name_the_modules_that_exist(package):
    module = importlib.import_module(package)
    doc = inspect.getdoc(module) or ""
    files = {m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_")}
    assert set(re.findall(r"``([a-z_]+)``", doc.split("=\n", 1)[1].rsplit("=\n", 1)[0])) == files, package


# README, Makefile, pyproject.toml, ARCHITECTURE.


def test_versions_agree():
    assert PYPROJECT["project"]["version"] == hsformat.__version__
    python = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {python}" in PYPROJECT["project"]["classifiers"]
    assert f"Python {python} or later" in README
    assert str(tuple(map(int, python.split(".")))) in MAKEFILE
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{python.replace('.', '')}"
    assert "## [Unreleased]" in TEXTS["CHANGELOG.md"] or f"## [{hsformat.__version__}]" in TEXTS["CHANGELOG.md"]


def test_make_targets_are_listed_explained_and_cited_by_their_names():
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M))
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[1].split())
    assert targets == phony
    assert set(re.findall(r'@echo "make ([a-z-]+)', MAKEFILE)) <= targets
    for place, text in TEXTS.items():
        cited = set(re.findall(r"`make ([a-z-]+)`", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.M))
        assert cited <= targets, place


def test_extras_that_are_cited_exist():
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    for place, text in {**TEXTS, **SOURCES}.items():
        for cited in re.findall(r"hsformat\[([a-z,]+)\]", text):
            assert set(cited.split(",")) <= extras, place


def test_extractors_of_the_readme_are_those_that_are_installed():
    known = set(PYPROJECT["project"]["entry-points"]["hsformat.extractors"])
    (line,) = re.findall(r"^- Extractors: (.*?)\.", README, re.M)
    (row,) = (line for line in README.splitlines() if line.startswith("| `--engine "))
    for text in (line, row.split(" | ")[0].replace("--engine ", "")):
        assert set(re.findall(r"`([a-z]+)[`,]?", text)) == known, text


def test_links_lead_somewhere():
    for place, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if "://" not in link:
                assert (ROOT / place).parent.joinpath(link).exists(), f"{place}: {link}"


def test_paths_of_the_readme_tree_exist():
    block = README.split("## The tree")[1].split("```")[1]
    top = ""
    for indent, name in re.findall(r"^( *)([\w./-]+)/ ", block, re.M):
        path = ROOT / top / name if indent else ROOT / name
        top = top if indent else name
        assert path.is_dir(), path
    packages = {p.parent.name for p in (ROOT / "hsformat").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", block, re.M)) == packages
    tops = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "_"))} - {"build", "dist"}
    assert set(re.findall(r"^(\w+)/", block, re.M)) == tops


def test_the_architecture_table_names_everything_in_the_core():
    rows = [line.split("|")[1] for line in ARCHITECTURE.splitlines() if line.startswith("| `")]
    named = {t.removeprefix("hsformat/").strip("/") for cell in rows for t in ticked(cell)}
    modules = {p.name for p in (ROOT / "hsformat").glob("*.py") if not p.name.startswith("__")}
    packages = {p.parent.name for p in (ROOT / "hsformat").glob("*/__init__.py")}
    assert modules | packages <= named
    for cell in rows:
        for path in ticked(cell):
            assert any((ROOT / base / path).exists() for base in ("", "hsformat")), path


def test_the_arrows_are_the_import_rules():
    (core,) = (c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c.get("containers") == ["hsformat"])
    block = " ".join(ARCHITECTURE.split("## The arrows")[1].split("```")[1].split("\n", 2)[2].split())
    arrows = [{n.strip() for n in part.split("|")} for part in block.split("->")]
    assert arrows == [{n.strip() for n in layer.split("|")} for layer in core["layers"]]
    assert {n for layer in arrows for n in layer} == {m.name for m in pkgutil.iter_modules(hsformat.__path__)} - {
        "__main__"
    }


def commands() -> list[tuple[str, list[str]]]:
    """Return every command line of the documents and the Makefile that calls hsformat, split into words."""
    out = []
    for place, text in TEXTS.items():
        blocks = [text] if place == "Makefile" else re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
        blocks += [] if place == "Makefile" else re.findall(r"`([^`\n]+)`", text)
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                m = re.match(r"\s*(?:\$\(BIN\)/|\.venv/bin/)?(?:hsformat|python -m hsformat(?:\.validate)?) (.*)", line)
                if m and "(" not in m[1].replace("$(", "") and not m[1].startswith("-"):
                    words = shlex.split(m[1], comments=True)
                    inner = "validate" if "hsformat.validate " in line else None
                    out.append((place, [inner, *words] if inner else words))
    return out


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x)[:40])
def test_command_lines_of_the_documents_exist(place, words):
    name, *rest = words
    if name in ("COMMAND", "..."):
        return
    if rest and f"{name} {rest[0]}" in cli_commands():
        name, rest = f"{name} {rest[0]}", rest[1:]
    assert name in cli_commands(), f"{place}: no command {name}"
    options = {flag: o for o in cli_options(cli_commands()[name]) for flag in o.flags}
    given = {w for w in rest if w.startswith("--")}
    assert given <= {*options, "--help"}, place
    for flag in given - {"--help"}:
        _, _, kind = options[flag].text.partition(" ")
        if "|" in kind:
            value = rest[rest.index(flag) + 1]
            variable = value.startswith("$(")  # of make
            assert variable or set(value.split("|")) <= set(kind.split("|")), f"{place}: {flag} {value}"
    if len(given - {"--help"}) > 2:  # a whole command, not a mention of one option
        required = {f for f, o in options.items() if o.default is None}
        assert required <= given, place


def test_command_lines_are_found():
    assert {"README.md", "Makefile"} <= {place for place, _ in commands()}
    assert len(commands()) > 8


def test_options_of_the_readme_exist():
    block = README.split("## Extraction")[1].split("## ")[0]
    options = {flag: o for o in cli_options(cli_commands()["extract"]) for flag in o.flags}
    rows = [line.split(" | ")[0] for line in block.splitlines() if line.startswith("| `--")]
    assert len(rows) > 3
    for row in rows:
        for flag in re.findall(r"--[a-z-]+", row):
            assert flag in options
    (last,) = (r for r in rows if "--last" in r)
    assert last.split("--last ")[1].strip("` ").replace("\\", "") == options["--last"].text.split(" ")[1]
