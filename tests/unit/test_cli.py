"""The command line on real files of a tiny Llama, with good and with bad input: codes, exit codes, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import build_store, tiny_contract, tiny_record
from safetensors.numpy import load_file, save_file

import hsformat as hs
from hsformat.problems import CODES

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
needs_torch = pytest.mark.needs("torch")
CHATS = [
    {"id": "a", "messages": [{"role": "user", "content": "Name a fruit."}, {"role": "assistant", "content": "Apple."}]},
    {
        "id": "b",
        "messages": [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "Seven."}],
    },
    {"id": "c", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
]


@pytest.fixture
def data(tmp_path) -> Path:
    return write(tmp_path / "data.jsonl", CHATS)


@pytest.fixture
def extract(cli, tmp_path, data):
    def run(*words: object, **changes: object) -> tuple[int, str, str]:
        options = {"model": MODEL, "data": data, "out": tmp_path / "out.hs.zarr", "layers": "2,4,5", **changes}
        return cli("extract", *(w for k, v in options.items() for w in (f"--{k}", v)), *words)

    return run


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def codes(text: str) -> set[str]:
    return {line.split()[1] for line in text.splitlines() if line.startswith(("error HS", "warning HS", "note HS"))}


@needs_torch
def test_extract_validate_info(extract, cli, tmp_path):
    code, out, _ = extract("--last", "pre")
    assert code == 0
    assert "3 records written" in out
    store = tmp_path / "out.hs.zarr"
    opened = hs.open(store, expect=hs.Layout(aux=("d2", "d4", "d5"), last="d8"))
    assert sorted(opened.ids) == ["a", "b", "c"]
    assert opened["c"].loss_mask.tolist() == [0, 0, 1, 1]
    for level in ("metadata", "sample", "full"):
        code, out, _ = cli("validate", store, "--level", level)
        assert (code, "valid at level" in out) == (0, True)
    code, out, _ = cli("validate", store, "--format", "json")
    report = json.loads(out)
    assert (report["valid"], report["records"], report["exit_code"]) == (True, 3, 0)
    code, out, _ = cli("info", store)
    line = next(x for x in out.splitlines() if x.strip().startswith("d4"))
    numbers = "Transformers hidden_states[4] vLLM id 4 SGLang id 3"
    assert " ".join(line.split()) == f"d4 residual after 4 of 8 layers bfloat16 {numbers}"
    assert "SGLang 0.5.23" in out
    facts = json.loads(cli("info", store, "--format", "json")[1])
    assert facts["contract"]["layout"] == {"aux": ["d2", "d4", "d5"], "last": "d8"}


@needs_torch
def test_turns_of_a_parquet_file_of_sharegpt(extract, tmp_path):
    table = pa.Table.from_pylist(
        [
            {
                "id": "s",
                "conversations": [
                    {"from": who, "value": text}
                    for who, text in [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
                ],
            }
        ]
    )
    pq.write_table(table, tmp_path / "data.parquet")
    code, out, err = extract("--explode-turns", data=tmp_path / "data.parquet")
    assert (code, "2 records written" in out) == (0, True), err
    store = hs.open(tmp_path / "out.hs.zarr")
    assert sorted(store.ids) == ["s#0", "s#1"]
    assert store["s#0"].num_tokens < store["s#1"].num_tokens
    assert extract("--explode-turns", data=tmp_path / "data.parquet")[1].count("2 were there already") == 1


@needs_torch
@pytest.mark.parametrize(
    ("last", "layout_last", "keys"),
    [
        ("pre", "d8", ("d2", "d4", "d5", "d8")),
        ("post", "d8n", ("d2", "d4", "d5", "d8n")),
        ("none", None, ("d2", "d4", "d5")),
    ],
)
def test_last(extract, tmp_path, last, layout_last, keys):
    assert extract("--last", last)[0] == 0
    contract = hs.open(tmp_path / "out.hs.zarr").contract
    assert (contract.keys, contract.layout.last) == (keys, layout_last)


@needs_torch
def test_second_run_into_the_same_store(extract):
    assert extract()[0] == 0
    code, out, _ = extract()
    assert (code, "0 records written" in out, "3 were there already" in out) == (0, True, True)
    code, _, err = extract("--codec", "fast")
    assert (code, codes(err)) == (1, {"HS507"})
    code, _, err = extract(layers="1,4,5")
    assert (code, codes(err)) == (1, {"HS507"})


@needs_torch
def test_generate(extract, tmp_path):
    prompts = write(tmp_path / "p.jsonl", [{"id": "a", "messages": [{"role": "user", "content": "Say hello."}]}])
    code, _, err = extract("--generate", 5, data=prompts)
    assert code == 0, err
    record = hs.open(tmp_path / "out.hs.zarr")["a"]
    assert record.provenance.generation.mode == "greedy"
    assert 1 <= record.loss_mask.sum() <= 5
    assert record.loss_mask[-1] == 1


@needs_torch
def test_json_summary_is_alone_on_stdout(extract):
    code, out, _ = extract("--format", "json")
    summary = json.loads(out)
    assert (summary["written"], summary["exit_code"], code) == (3, 0, 0)


@pytest.mark.parametrize("layers", ["9", "2,2", "-1", "two", "", "2,,3", "1.5"])
def test_depth_beyond_n_or_no_depth(extract, tmp_path, layers):
    code, _, err = extract(layers=layers)
    assert (code, codes(err)) == (1, {"HS304"})
    assert not (tmp_path / "out.hs.zarr").exists()


@needs_torch
def test_rows_that_cannot_be_used_are_reported_and_the_rest_is_stored(extract, tmp_path):  # the kinds of bad rows
    rows = [
        *CHATS,
        {"id": "long", "input_ids": [1] * 4, "loss_mask": [1] * 9},
        {"id": "vocab", "input_ids": [1, 512], "loss_mask": [0, 1]},
        {"id": "user", "messages": [{"role": "user", "content": "Nobody answers."}]},
    ]
    path = write(tmp_path / "mixed.jsonl", rows)
    with path.open("ab") as f:
        f.write(b'{"id": "latin", "messages": [{"role": "user", "content": "\xe9"}]}\n')
        f.write(b'{"id": "cut", "messages": [{"role": "us')
    code, out, err = extract(data=path)
    assert code == 1
    assert codes(err) == {"HS101", "HS105", "HS602"}
    assert "no-assistant-turn" in out
    assert sorted(hs.open(tmp_path / "out.hs.zarr").ids) == ["a", "b", "c"]


@needs_torch
def test_everything_dropped(extract, tmp_path):
    path = write(tmp_path / "none.jsonl", [{"id": "u", "messages": [{"role": "user", "content": "Hm."}]}])
    code, _, err = extract(data=path)
    assert (code, codes(err)) == (1, {"HS103"})
    assert not (tmp_path / "out.hs.zarr").exists()


@pytest.mark.parametrize("kind", ["absent", "empty", "folder"])
def test_data_that_cannot_be_opened(extract, tmp_path, kind):
    path = tmp_path / "x.jsonl"
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    code, _, err = extract(data=path)
    expected = {"absent": (2, {"HS602"}), "empty": (1, {"HS602"}), "folder": (1, {"HS603"})}
    assert (code, codes(err)) == expected[kind]
    assert not (tmp_path / "out.hs.zarr").exists()


def test_model_folders_that_cannot_be_used(extract, tmp_path):
    code, _, err = extract(model=tmp_path / "absent")
    assert (code, codes(err)) == (2, {"HS602"})
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "model.safetensors").unlink()
    code, _, err = extract(model=folder)
    assert (code, codes(err)) == (1, {"HS411"})
    (folder / "config.json").write_text('{"architectures": ["Llama')
    code, _, err = extract(model=folder)
    assert (code, "HS602" in codes(err)) == (1, True)


@needs_torch
def test_weights_that_make_another_model(extract, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    code, _, err = extract(model=folder, layers="2,3,4")  # Transformers would leave the eighth layer out
    assert (code, codes(err)) == (1, {"HS301"})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][5, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    code, _, err = extract("--generate", 3, model=folder)  # answers would be the token whose logit is NaN
    assert (code, codes(err)) == (1, {"HS201"})
    assert not (tmp_path / "out.hs.zarr").exists()


@needs_torch
def test_output_that_is_no_path(extract, tmp_path, monkeypatch):
    for out in ("ftp://bucket/x.hs.zarr", "s3://", ""):
        code, _, err = extract(out=out)
        assert (code, codes(err)) == (2, {"HS501"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert extract(out=".")[0] == 0
    assert len(hs.open(".")) == 3


@needs_torch
def test_output_path_that_holds_something_else(extract, tmp_path):
    out = tmp_path / "out.hs.zarr"
    out.write_text("mine")
    code, _, err = extract()
    assert (code, codes(err), out.read_text()) == (2, {"HS501"}, "mine")


@pytest.mark.parametrize("kind", ["absent", "file", "empty folder", "folder", "cut", "future", "unknown", "missing"])
@pytest.mark.parametrize("command", ["validate", "info"])
def test_paths_that_are_no_store(cli, tmp_path, kind, command):
    path = tmp_path / "x.hs.zarr"
    expected = "HS501"
    if kind == "file":
        path.write_text("x")
    elif kind in ("folder", "empty folder"):
        path.mkdir()
    if kind == "folder":
        (path / "notes.txt").write_text("x")
    if kind in ("cut", "future", "unknown", "missing"):
        build_store(path, tiny_contract(), [tiny_record(tiny_contract())])
        root = path / "zarr.json"
        data = json.loads(root.read_text())
        attribute = data["attributes"]["hsformat"]
        if kind == "future":
            attribute["spec_version"] = attribute["contract"]["spec_version"] = "9.0"
        elif kind == "unknown":
            attribute["contract"]["surprise"] = 1
        elif kind == "missing":
            del attribute["contract"]["tokenizer_digest"]
        text = json.dumps(data)
        root.write_text(text[:100] if kind == "cut" else text)
        expected = "HS501" if kind == "cut" else "HS502"
    code, out, err = cli(command, path)
    assert (code, codes(out + err)) == (2, {expected})
    if kind in ("unknown", "missing"):
        assert {"unknown": "surprise", "missing": "tokenizer_digest"}[kind] in out + err


@pytest.mark.parametrize("command", ["info", "validate", "extract"])
def test_json_is_on_stdout_when_a_command_fails_too(cli, extract, tmp_path, command):
    absent = tmp_path / "absent"
    run = (
        extract("--format", "json", model=absent) if command == "extract" else cli(command, absent, "--format", "json")
    )
    code, out, _ = run
    report = json.loads(out)
    assert (code, report["exit_code"], len(report["problems"])) == (2, 2, 1)


def test_info_shows_stores_that_no_reader_here_understands(cli, tmp_path):
    field = {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": True}
    hs.create(tmp_path / "x.hs.zarr", tiny_contract(fields=[field])).close()
    code, out, _ = cli("info", tmp_path / "x.hs.zarr")
    assert (code, "weight: float32" in out) == (0, True)


def test_usage_errors(cli, extract):
    assert cli()[0] == 2
    assert cli("validate")[0] == 2
    assert extract("--last", "middle")[0] == 2
    assert extract("--generate", "4", "--temperature", "0.7")[0] == 2  # no seed
    assert extract("--seed", "1")[0] == 2
    sampled = ("--generate", 4, "--seed", 1, "--temperature")
    assert extract(*sampled, "nan")[0] == extract(*sampled, "0.5", "--top-p", "0")[0] == 2
    assert extract("--option", "device")[0] == 2
    assert extract("--template-kwargs", "[1]")[0] == 2
    code, _, err = extract(engine="nothing")
    assert (code, codes(err)) == (2, {"HS410"})


@pytest.mark.parametrize("code", sorted(CODES))
def test_explain_every_code(cli, code):
    exit_code, out, _ = cli("explain", code.lower())
    assert exit_code == 0
    assert out.startswith(f"{code} {CODES[code].name}")
    assert cli("explain", CODES[code].name)[1] == out


def test_explain_unknown_and_all(cli):
    assert cli("explain", "HS999")[0] == 2
    assert len(cli("explain")[1].splitlines()) == len(CODES)
