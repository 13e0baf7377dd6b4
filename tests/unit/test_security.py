"""What SECURITY.md promises of code that is never run; what it says of sizes is in test_hostile_store.py."""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import hsformat as hs
from hsformat.prepare.conversation import Conversation
from hsformat.prepare.render import Renderer
from hsformat.prepare.tokenizer import load_tokenizer
from hsformat.store.metadata import MAX_JSON_BYTES
from hsformat.target import describe
from hsformat.target.checkpoint import _MAX_HEADER
from hsformat.target.jsonfiles import MAX_TEXT_BYTES, read_object

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")
TINY = ROOT / "tests/data/tiny-llama"
CODE = [p for folder in ("hsformat", "extractors") for p in (ROOT / folder).rglob("*.py")]


def calls() -> list[tuple[str, str, ast.Call]]:
    """Return (file, dotted name, call) of every call in the package."""
    out = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                out.append((str(path.relative_to(ROOT)), ast.unparse(node.func), node))
    return out


def test_nothing_that_executes_data_is_called():
    forbidden = re.compile(
        r"(pickle|marshal|shelve|dill|cloudpickle|joblib|yaml)\.|(^|\.)torch\.load$|^(eval|exec|compile|__import__)$|"
        r"(^|\.)(system|popen|run_path|run_module)$|^subprocess\."
    )
    own = {
        "extractors/hsformat_extractors/processes.py",  # starts an engine, by a module of its own
        "hsformat/testing/examples.py",  # runs the examples that it holds itself
    }
    assert [(file, name) for file, name, _ in calls() if forbidden.search(name) and file not in own] == []
    pickles = [ast.unparse(k.value) for _, _, call in calls() for k in call.keywords if k.arg == "allow_pickle"]
    assert set(pickles) <= {"False"}


def test_nothing_is_downloaded_and_no_code_of_a_folder_is_trusted():
    loads = [(file, call) for file, name, call in calls() if name.endswith(".from_pretrained")]
    assert len(loads) >= 3
    for file, call in loads:
        given = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert (given.get("local_files_only"), given.get("trust_remote_code")) == ("True", "False"), file


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_pickled_weights_are_refused_and_not_loaded(tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "was-run"
    folder.mkdir()
    for file in TINY.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(hs.ForeignFileError) as e:
        describe(folder)
    assert [p.code for p in e.value.problems] == ["HS601"]
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()  # it would have been


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set x = messages.append({'role': 'user', 'content': 'x'}) %}",
    ],
)
def test_a_template_is_kept_from_the_system(attack, tmp_path):
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(attack + "{% for m in messages %}{{ m.content }}{% endfor %}")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    conversation = Conversation(id="c", where="here", content=b"", ignored=(), messages=talk, tools=None)
    result = Renderer(load_tokenizer(tmp_path), template_kwargs={}).conversation(conversation)
    assert isinstance(result, hs.Problem)
    assert result.code == "HS303"


def test_json_that_two_readers_take_for_two_things(tmp_path):
    for text in ('{"num_hidden_layers": 2, "num_hidden_layers": 3}', '{"x": NaN}', '{"x": 1e999}', "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(hs.ForeignFileError) as e:
            read_object(tmp_path / "config.json")
        assert [p.code for p in e.value.problems] == ["HS602"]


def test_files_of_a_model_folder_without_an_end(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(hs.ForeignFileError) as e:
        read_object(tmp_path / "config.json")
    assert [p.code for p in e.value.problems] == ["HS602"]
    (tmp_path / "config.json").unlink()
    with (tmp_path / "config.json").open("wb") as f:
        f.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(hs.ForeignFileError, match="at most"):
        read_object(tmp_path / "config.json")


def test_a_header_that_claims_more_than_there_is(tmp_path):
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [2**40], "data_offsets": [0, 2**41]}}).encode()
    for length in (len(header), 2**60):
        (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header)
        with pytest.raises(hs.ForeignFileError) as e:
            describe(tmp_path)
        assert {p.code for p in e.value.problems} == {"HS602"}


def test_the_numbers_that_are_told_are_those_of_the_code():
    text = " ".join(SECURITY.split())
    assert f"more than {MAX_JSON_BYTES >> 20} MiB is refused" in text
    assert f"larger than {MAX_TEXT_BYTES >> 20} MiB" in text
    assert f"more than {_MAX_HEADER // 10**6} MB" in text
    for path in re.findall(r"`(tests/\S+\.py)`", SECURITY):
        assert (ROOT / path).exists()


def test_a_record_is_removed_with_its_segment(tmp_path, contract):
    from factories import build_store, tiny_record

    records = [tiny_record(contract, f"r{i}") for i in range(6)]
    path = build_store(tmp_path / "s", contract, records, segments=3)
    (owner,) = [s for s in hs.open(path).segments if "r2" in s.ids]
    for file in sorted((path / owner.prefix).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (path / owner.prefix).rmdir()
    assert hs.validate_store(path, level="full") == []
    with hs.append(path) as writer:
        assert "r2" not in writer.ids
        for record in records:
            if record.id not in writer.ids and record.id != "r2":
                writer.append(record)
    store = hs.open(path)
    assert sorted(store.ids) == ["r0", "r1", "r3", "r4", "r5"]
    needle = np.ascontiguousarray(records[2].hidden["d1"]).tobytes()
    assert not [p for p in path.rglob("*") if p.is_file() and (needle in p.read_bytes() or b'"r2"' in p.read_bytes())]
