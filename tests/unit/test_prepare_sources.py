"""Sources of every kind give the same rows: JSON Lines, Parquet, datasets on disk; what is none is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsformat.prepare.conversation import Conversation, parse_row
from hsformat.prepare.rows import count_rows, open_source, read_rows
from hsformat.problems import HsError, NothingToOpen, Problem

CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}, "type": "function"}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "score": 1.5},
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    {"id": "x", "messages": [{"role": "user", "content": "é\n"}, {"role": "assistant", "content": "b"}]},
]


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(rows)), path, row_group_size=2)
    return path


def dataset_folder(path: Path, rows: list[dict[str, Any]], *, files: int = 2, **state: Any) -> Path:
    """Write what ``datasets`` 5.2.0 writes: Arrow streams, their list, and a description."""
    path.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    table = pa.Table.from_pylist(rows, schema=_schema(rows))
    per = -(-len(rows) // files)
    for i, name in enumerate(names):
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table.slice(i * per, per))
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], **state}))
    (path / "dataset_info.json").write_text("{}")
    return path


def _schema(rows: list[dict[str, Any]]) -> pa.Schema:
    merged = {k: next(r[k] for r in rows if k in r) for r in rows for k in r}
    messages = [m for r in rows for m in r.get("messages", [])]
    return pa.Table.from_pylist([merged | ({"messages": messages} if messages else {})]).schema


KINDS = {"data.jsonl": json_lines, "data.parquet": parquet, "data": dataset_folder}


@pytest.fixture(params=KINDS)
def write(request, tmp_path):
    return lambda rows: KINDS[request.param](tmp_path / request.param, rows)


def test_every_kind_gives_the_same_conversations(write, tmp_path):
    path = write(ROWS)
    wanted = [parse_row(r) for r in read_rows(json_lines(tmp_path / "wanted.jsonl", ROWS))]
    found = [parse_row(r) for r in read_rows(path)]
    assert count_rows(path) == len(found) == 3
    for a, b in zip(found, wanted, strict=True):
        assert isinstance(a, Conversation)
        assert (a.id, a.content, a.messages, a.tools) == (b.id, b.content, b.messages, b.tools)
    assert "score" in found[0].ignored
    assert found[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_ids_and_masks_in_columns(write):
    (row,) = read_rows(write([{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]))
    item = parse_row(row)
    assert (item.input_ids, item.loss_mask) == ([1, 2, 3], [0, 1, 1])


def test_rows_are_read_as_needed_and_again(write):
    rows = [{"id": str(i), "messages": ROWS[0]["messages"]} for i in range(700)]
    source = open_source(write(rows))
    first = next(source.rows())
    assert first.value["id"] == "0"
    assert [r.value["id"] for r in source.rows()] == [str(i) for i in range(700)]
    assert source.count() == 700


def test_columns_that_mean_nothing_are_not_read(tmp_path, monkeypatch):
    path = parquet(tmp_path / "d.parquet", [{"id": "a", "messages": ROWS[0]["messages"], "image": "x" * 1000}])
    asked: list[list[str]] = []
    real = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, **k: asked.append(k["columns"]) or real(self, **k))
    (row,) = read_rows(path)
    assert asked == [["id", "messages"]]
    assert row.value["image"] is None


def test_a_null_in_a_struct_is_a_missing_key(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]}]
    (row,) = read_rows(parquet(tmp_path / "d.parquet", rows))
    assert row.value["messages"][0] == {"role": "user", "content": "a"}


def test_text_that_is_not_utf8_is_one_problem(tmp_path):
    raw = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary())
    table = pa.table({"id": pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])})
    pq.write_table(table, tmp_path / "d.parquet")
    found = list(read_rows(tmp_path / "d.parquet"))
    assert [isinstance(r, Problem) for r in found] == [False, True, False]
    assert (found[1].code, found[1].where.endswith("row 1")) == ("HS602", True)


def refused(path: Path) -> Problem:
    for read in (read_rows, count_rows):
        with pytest.raises(HsError) as e:
            read(path)
    return e.value.problems[0]


def test_unknown_kinds_are_refused_and_the_known_ones_listed(tmp_path):
    for name, content in {
        "a.txt": b"hello", "a.jsonl.gz": b"\x1f\x8b\x08", "a.zip": b"PK\x03\x04", "a.arrow": b"ARROW1\0\0",
        "a.csv": b"role,content\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        problem = refused(tmp_path / name)
        assert problem.code == "HS603"
        assert "JSON Lines" in problem.expected
        assert "Parquet" in problem.expected
    assert refused(tmp_path).code == "HS603"


def test_a_bad_first_line_is_a_problem_in_its_place_where_the_name_says_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"oops\n" + json.dumps(ROWS[0]).encode() + b"\n")
    assert [isinstance(r, Problem) for r in read_rows(tmp_path / "a.jsonl")] == [True, False]


def test_nothing_there(tmp_path):
    with pytest.raises(NothingToOpen):
        read_rows(tmp_path / "none.parquet")


def test_damage_is_refused_with_its_code(tmp_path):
    (tmp_path / "named.parquet").write_bytes(b"{}")
    whole = parquet(tmp_path / "whole.parquet", ROWS).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    folder = dataset_folder(tmp_path / "cut", ROWS)
    (folder / "data-00001-of-00002.arrow").write_bytes(b"\xff\xff\xff\xff\x10")
    dataset_folder(tmp_path / "gone", ROWS)
    (tmp_path / "gone" / "data-00000-of-00002.arrow").unlink()
    dataset_folder(tmp_path / "state", ROWS)
    (tmp_path / "state" / "state.json").write_text("[]")
    for name in ("named.parquet", "cut.parquet", "cut", "gone", "state"):
        assert refused(tmp_path / name).code == "HS602", name
    for kind in ("e.parquet", "e"):
        path = KINDS[f"data{Path(kind).suffix}"](tmp_path / kind, ROWS)
        if path.is_dir():
            shutil.rmtree(path)
            dataset_folder(path, [*ROWS])
            (path / "state.json").write_text('{"_data_files": []}')
        else:
            pq.write_table(pa.table({"id": pa.array([], pa.string())}), path)
        assert refused(path).code == "HS602", kind


def test_damage_in_the_middle_is_a_problem_and_what_was_read_stays(tmp_path):
    rows = [{"id": f"{i:06}", "messages": ROWS[0]["messages"]} for i in range(1000)]
    path = parquet(tmp_path / "d.parquet", rows)
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(400).column(0)
    start = at.dictionary_page_offset or at.data_page_offset
    data[start : start + at.total_compressed_size] = b"\xff" * at.total_compressed_size
    path.write_bytes(data)
    *good, last = read_rows(path)
    assert isinstance(last, Problem)
    assert last.code == "HS602"
    assert 0 < len(good) < 1000
    assert not any(isinstance(r, Problem) for r in good)


def test_splits_and_indices_of_a_dataset(tmp_path):
    dataset_folder(tmp_path / "d" / "train", ROWS)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    problem = refused(tmp_path / "d")
    assert (problem.code, str(tmp_path / "d" / "train") in problem.fix) == ("HS603", True)
    path = dataset_folder(tmp_path / "i", ROWS, _indices_data_files=[{"filename": "indices.arrow"}])
    assert (refused(path).code, "flatten_indices" in refused(path).fix) == ("HS603", True)


def test_names_in_the_state_do_not_leave_the_folder(tmp_path):
    path = dataset_folder(tmp_path / "d", ROWS)
    shutil.copy(path / "data-00000-of-00002.arrow", tmp_path / "outside.arrow")
    (path / "state.json").write_text('{"_data_files": [{"filename": "../outside.arrow"}]}')
    assert refused(path).code == "HS602"


def test_missing_pyarrow_names_the_command(tmp_path, monkeypatch):
    path = parquet(tmp_path / "d.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    problem = refused(path)
    assert (problem.code, "pip install 'hsformat[parquet]'" in problem.fix) == ("HS410", True)


def test_times_beyond_python_are_one_problem(tmp_path):
    for values in (pa.array([0, 2**62], pa.timestamp("us")), pa.array([0, 2**30], pa.date32())):
        pq.write_table(pa.table({"id": values}), tmp_path / "d.parquet")
        good, bad = read_rows(tmp_path / "d.parquet")
        assert isinstance(bad, Problem)
        assert (isinstance(good, Problem), bad.code, bad.where.endswith("row 1")) == (False, "HS602", True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_files_of_other_columns_are_no_one_dataset(tmp_path, order):
    path = dataset_folder(tmp_path / "d", ROWS)
    tables = [pa.table({"messages": ["a"]}), pa.table({"messages": ["a"], "id": ["x"]})]
    for file, i in zip(sorted(path.glob("*.arrow")), order, strict=True):
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, tables[i].schema) as writer:
            writer.write_table(tables[i])
    problem = refused(path)
    assert (problem.code, "differ in id" in problem.expected) == ("HS603", True)
    assert problem.where.endswith("data-00001-of-00002.arrow")


def test_a_dataset_file_without_a_row_has_its_columns(tmp_path):
    path = dataset_folder(tmp_path / "d", ROWS[:1])  # the second of the files is empty
    assert len(list(read_rows(path))) == count_rows(path) == 1


def test_two_columns_of_one_name(tmp_path):
    twice = pa.table([["a"], ["b"]], names=["messages", "messages"])
    pq.write_table(twice, tmp_path / "d.parquet")
    assert (refused(tmp_path / "d.parquet").code, "messages" in refused(tmp_path / "d.parquet").got) == ("HS603", True)
    path = dataset_folder(tmp_path / "d", ROWS, files=1)
    with pa.OSFile(str(next(path.glob("*.arrow"))), "wb") as sink, pa.ipc.new_stream(sink, twice.schema) as writer:
        writer.write_table(twice)
    assert refused(path).code == "HS603"


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ("[" * 100_000, "recursion"),
        ("[]", "a JSON list"),
        ("{}", "_data_files: None"),
        ('{"_data_files": [3]}', "[3]"),
        ('{"_data_files": [{"filename": 3}]}', "'filename': 3"),
        ('{"_data_files": [{"filename": ".."}]}', None),
    ],
)
def test_a_state_that_is_none_says_what_was_found(tmp_path, state, got):
    path = dataset_folder(tmp_path / "d", ROWS)
    (path / "state.json").write_text(state)
    problem = refused(path)
    assert problem.code == "HS602"
    assert got is None or got in problem.got
    assert "Error" not in problem.got


def test_a_pipe_is_refused_before_a_byte_is_taken(tmp_path):
    os.mkfifo(tmp_path / "d.jsonl")
    writer = os.open(tmp_path / "d.jsonl", os.O_RDWR)  # a pipe with a writer, in which a reader would find the rows
    try:
        os.write(writer, json.dumps(ROWS[0]).encode() + b"\n")
        problem = refused(tmp_path / "d.jsonl")
        assert (problem.code, "a pipe" in problem.got, "to a file" in problem.fix) == ("HS603", True, True)
        assert os.read(writer, 1) == b"{"
    finally:
        os.close(writer)
    assert "device" in refused(Path("/dev/null")).got
