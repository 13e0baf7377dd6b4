"""One real example of each problem code: a few lines of Python that run, and the problem that comes of them.

``make docs`` runs them and keeps what they gave in hsformat/spec/examples.json, which docs/problems.md and ``hsformat
explain`` show. An example begins with :data:`PREAMBLE`, in an empty folder; its problems are those of the error that it
raises, or else of the list that its last line gives. May import everything of the core but the command line.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import tempfile
import textwrap
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from hsformat.problems import CODES, HsError, Problem

__all__ = ["EXAMPLES", "FILE", "NOT_REPORTED", "PREAMBLE", "examples_file", "run_example"]

FILE = Path("hsformat/spec/examples.json")
SHOWN = 2
"""Problems of an example; of more, the first."""

PREAMBLE = """
import numpy as np
import hsformat as hs
from hsformat.testing import build_store, digest, tiny_contract, tiny_record, tiny_target

contract = tiny_contract()  # 4 layers, hidden size 8, vocabulary 100; captures d1, d2, d3, d4 in bfloat16
"""

_STORE = """
    records = [tiny_record(contract, "a"), tiny_record(contract, "b")]
    store = build_store("data.hs.zarr", tiny_contract(codec="fast"), records)
    segment = next((store / "segments").glob("*-0"))
    """
_TARGET = """
    from hsformat.target import describe, load_key_tensor

    model = describe(tiny_target("model"))  # a folder with config, tokenizer, embedding, final norm and head
    contract = tiny_contract(target=model.model.model_dump(), tokenizer_digest=model.tokenizer_digest)
    """


_DRAFT = """
    import json

    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 100,
        "draft_vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "num_aux_hidden_states": 3,
    }
    """
_SERVED = """
    (tiny_target("draft") / "config.json").write_text(json.dumps(config))
    hs.engines.inspect("vllm", draft="draft", target=tiny_target("model"), version="0.32.0")[1]
    """


def _code(*parts: str) -> str:
    return "\n".join(textwrap.dedent(part).rstrip(" ").removeprefix("\n").removesuffix("\n") for part in parts)


def _written(record: str) -> str:
    return f'with hs.create("data.hs.zarr", contract) as writer:\n    writer.append({record})'


EXAMPLES: dict[str, str] = {
    "HS101": _written("tiny_record(contract, tokens=4095, loss_mask=np.ones(5147, np.uint8))"),
    "HS102": _written("tiny_record(contract, tokens=0)"),
    "HS103": _written("tiny_record(contract, loss_mask=[0, 0, 0, 0, 0, 0, 0])"),
    "HS104": _written("tiny_record(contract, loss_mask=[0, 0, 0, 1, 1, 2, 1])"),
    "HS105": _written("tiny_record(contract, input_ids=[1, 2, 3, 4, 5, -100, -100])"),
    "HS106": _written("tiny_record(contract, position_ids=[0, 1, 2, 3, 0, 1, 2])"),
    "HS107": _code("""
        with hs.create("data.hs.zarr", contract) as writer:
            writer.append(tiny_record(contract, "c-12"))
            writer.append(tiny_record(contract, "c-12", seed=1))
        """),
    "HS108": _code(
        "import zarr\n\n",
        _STORE,
        """
        zarr.open_array(segment / "token_offsets", mode="r+")[1] = 9
        hs.validate_store(store)
        """,
    ),
    "HS109": _code("""
        record = tiny_record(contract)
        del record.hidden["d3"]
        with hs.create("data.hs.zarr", contract) as writer:
            writer.append(record)
        """),
    "HS110": _code("""
        from hsformat.extraction import ExtractionRequest
        from hsformat.extraction.answers import check_answer

        request = ExtractionRequest(
            model="model",
            target=contract.target,
            captures=contract.captures,
            generation=hs.Generation(mode="none"),
            batch_tokens=4096,
        )
        answer = tiny_record(contract)  # what an engine gave back for this sample
        sample = hs.TokenSample(id="r0", input_ids=answer.input_ids, loss_mask=np.roll(answer.loss_mask, 1))
        check_answer(request, sample, answer)
        """),
    "HS201": _code("""
        record = tiny_record(contract)
        record.hidden["d2"][5, 3] = np.nan
        with hs.create("data.hs.zarr", contract) as writer:
            writer.append(record)
        """),
    "HS202": _written('tiny_record(contract, hidden={"d2": np.zeros((7, 8), np.float32)})'),
    "HS203": _code("""
        records = [tiny_record(contract, f"r{i}", tokens=40) for i in range(24)]
        records[5].hidden["d2"] *= 16
        hs.validate_store(build_store("data.hs.zarr", contract, records))
        """),
    "HS204": _code(
        _TARGET,
        """
        record = tiny_record(contract)
        record.hidden["d1"] = load_key_tensor("model", "embedding")[record.input_ids]  # depth 0, called depth 1
        hs.validate_store(build_store("data.hs.zarr", contract, [record]), target="model")
        """,
    ),
    "HS205": _code(
        _TARGET,
        """
        record = tiny_record(contract)
        x = record.hidden["d4"].astype(np.float32)
        x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True))
        record.hidden["d4"] = x * load_key_tensor("model", "final_norm").astype(np.float32)
        hs.validate_store(build_store("data.hs.zarr", contract, [record]), target="model")
        """,
    ),
    "HS206": _code(
        _TARGET,
        """
        captures = [hs.Capture(depth=d, norm="none", dtype="bfloat16") for d in (0, 2)]
        contract = contract.model_copy(update={"captures": captures, "layout": hs.Layout(aux=("d2",), last=None)})
        record = tiny_record(contract)
        record.hidden["d0"] = load_key_tensor("model", "embedding")[np.roll(record.input_ids, 1)]
        hs.validate_store(build_store("data.hs.zarr", contract, [record]), target="model")
        """,
    ),
    "HS207": _code("""
        captures = [{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)]
        contract = tiny_contract(captures=captures)
        with hs.create("data.hs.zarr", contract) as writer:
            writer.append(tiny_record(contract, hidden={"d2": np.full((7, 8), 7e4, np.float32)}))
        """),
    "HS301": 'hs.compare(contract, tiny_contract(target={"basis_digest": digest("b")}))',
    "HS302": 'hs.compare(contract, tiny_contract(tokenizer_digest=digest("b")))',
    "HS303": _code(
        _TARGET,
        """
        record = tiny_record(contract, provenance=hs.Provenance(template_digest=digest("c")))
        hs.validate_store(build_store("data.hs.zarr", contract, [record]), target="model")
        """,
    ),
    "HS304": 'hs.engines.engine_number("vllm", "LlamaForCausalLM", 30, "d31")',
    "HS305": 'hs.compare(contract, tiny_contract(target={"quantization": "fp8"}))',
    "HS401": 'hs.compare(contract, hs.Layout(aux=("d3", "d2", "d1"), last="d4"))',
    "HS402": 'hs.compare(contract, hs.Layout(aux=("d1", "d2"), last="d4"))',
    "HS403": _code(_DRAFT, 'del config["eagle_aux_hidden_state_layer_ids"]', _SERVED),
    "HS404": _code(_DRAFT, 'config["eagle_config"] = {"layer_ids": [0, 1, 2]}', _SERVED),
    "HS405": 'hs.compare(contract, hs.Layout(aux=("d1", "d2", "d3"), last="d4n"))',
    "HS406": _code(
        _DRAFT,
        """
        (tiny_target("draft") / "config.json").write_text(json.dumps(config))
        served, _ = hs.engines.inspect("vllm", draft="draft", target=tiny_target("model"), version="0.32.0")
        shifted = hs.EAGLE3_SHIFT.model_copy(update={"target": 1})  # an engine that would predict one token earlier
        hs.compare(contract, served.model_copy(update={"shift": shifted}))
        """,
    ),
    "HS407": _code(_DRAFT, 'del config["rope_theta"]', _SERVED),
    "HS408": _code(_DRAFT, 'config["draft_vocab_size"] = 24  # and no d2t', _SERVED),
    "HS409": _written('tiny_record(contract, hidden={"d2": np.ones((7, 16), np.float32)})'),
    "HS410": 'hs.engines.engine_number("sglang", "T5ForConditionalGeneration", 24, "d2")',
    "HS411": _code("""
        from hsformat.target import describe

        (tiny_target("model") / "model.safetensors").unlink()
        describe("model")
        """),
    "HS412": _code("""
        from hsformat.target import describe

        describe(tiny_target("model", tie_word_embeddings=True))  # and an lm_head of its own
        """),
    "HS501": 'hs.open("data.hs.zarr")',
    "HS502": _code(
        _STORE,
        """
        text = (store / "zarr.json").read_text()
        (store / "zarr.json").write_text(text.replace('"spec_version": "1.0"', '"spec_version": "2.0"'))
        hs.open(store)
        """,
    ),
    "HS503": _code(
        _STORE,
        """
        (segment / "hidden/d2/c/0/0").unlink()
        hs.validate_store(store)
        """,
    ),
    "HS504": _code(
        _STORE,
        """
        data = bytearray((segment / "hidden/d2/c/0/0").read_bytes())
        data[40] ^= 1
        (segment / "hidden/d2/c/0/0").write_bytes(data)
        hs.validate_store(store, level="full")
        """,
    ),
    "HS505": _code(
        _STORE,
        """
        data = (segment / "hidden/d2/c/0/0").read_bytes()
        (segment / "hidden/d2/c/0/0").write_bytes(data[:-9])
        hs.validate_store(store, level="metadata")
        """,
    ),
    "HS506": _code(
        _STORE,
        """
        (segment / "zarr.json").unlink()  # as if the writer had been killed before it was written
        hs.open(store).problems
        """,
    ),
    "HS507": _code("""
        captures = [{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)]
        hs.compare(contract, tiny_contract(captures=captures))
        """),
    "HS508": _code(
        "import zarr\nimport hsformat.zarr_dtype  # so that zarr knows bfloat16\n\n",
        _STORE,
        """
        zarr.consolidate_metadata(store)
        hs.validate_store(store)
        """,
    ),
    "HS601": _code("""
        from hsformat.target import describe

        (tiny_target("model") / "model.safetensors").rename("model/pytorch_model.bin")
        describe("model")
        """),
    "HS602": _code("""
        from hsformat.target import describe

        weights = tiny_target("model") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        describe("model")
        """),
    "HS603": _code("""
        from hsformat.target import describe

        describe(tiny_target("model", vocab_size=None))
        """),
    "HS604": _written('tiny_record(contract, source_digest="banana")'),
}
"""Source of the example of each code that something reports."""

NOT_REPORTED = tuple(code for code in CODES if code not in EXAMPLES)
"""Codes that nothing in hsformat reports yet; a test compares them with the sources."""

_SEGMENT = re.compile(r"\b[0-9a-f]{20}(?=-[0-9*]|\b)")


def run_example(code: str) -> list[Problem]:
    """Run an example in an empty folder and return its problems.

    Raises
    ------
    KeyError
        The code has none.
    RuntimeError
        It ends without a problem of its code: a defect of the example.
    """
    tree = ast.parse(f"{PREAMBLE}\n{EXAMPLES[code]}")
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, Any] = {}
    result: Any = None
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr, about consolidated metadata
        try:
            exec(compile(tree, code, "exec"), names)
            if isinstance(last, ast.Expr):
                result = eval(compile(ast.Expression(last.value), code, "eval"), names)
        except HsError as e:
            result = e.problems
    if not isinstance(result, list) or code not in {p.code for p in result}:
        raise RuntimeError(f"the example of {code} gave {result!r}")
    return result


def _told(code: str) -> str:
    """Return the problems of an example as text, at most two; names of writers, new at each run, are ``<writer>``."""
    found = sorted(run_example(code), key=lambda p: p.code != code)
    shown = found if len(found) <= SHOWN else found[:1]
    more = len(found) - len(shown)
    text = "\n".join([*map(str, shown), *([f"... and {more} more"] if more else [])])
    return _SEGMENT.sub("<writer>", text)


@cache
def examples_file() -> str:
    """Return hsformat/spec/examples.json: the preamble, and by code the source of its example and what came of it."""
    examples = {code: {"source": source, "problems": _told(code)} for code, source in EXAMPLES.items()}
    return f"{json.dumps({'preamble': PREAMBLE.strip(), 'examples': examples}, indent=1, ensure_ascii=False)}\n"
