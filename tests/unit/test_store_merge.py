"""Merging: segments of stores of one meaning are copied; every other case is refused before a byte is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from factories import assert_same_record, tiny_contract, tiny_record
from tiny_models import HIDDEN, LAYERS, save_tiny
from typer.testing import CliRunner

import hsformat.store as hs
from hsformat.cli.commands import app
from hsformat.contract import Contract
from hsformat.dtypes import BFLOAT16, to_float32
from hsformat.maintain import merge_stores, repair_store
from hsformat.maintain.finalnorm import load_final_norm, normed_contract
from hsformat.problems import ContractMismatch, HsError, Severity, StoreError
from hsformat.record import Record
from hsformat.store.commit import load_commit
from hsformat.store.local import LocalBackend
from hsformat.store.metadata import segment_names
from hsformat.target.keytensors import basis_digest, key_tensors
from hsformat.validate import validate_store

pytestmark = pytest.mark.needs("torch")  # of the final norm's tests, and of the tiny models

CONTRACT = tiny_contract()
RECORDS = [tiny_record(CONTRACT, f"r{i}", tokens=9 + i, seed=i) for i in range(6)]


def write(path: Path, records: Sequence[Record], contract: Contract = CONTRACT, **options: Any) -> Path:
    """Write a new store of two segments."""
    with hs.create(path, contract, **options) as writer:
        for i, record in enumerate(records):
            writer.append(record)
            if i == 0:
                writer.flush()
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return write(tmp_path / "a", RECORDS[:3], codec="compact")


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return write(tmp_path / "b", RECORDS[3:], codec="fast")


def names(path: Path) -> list[str]:
    return segment_names(LocalBackend(str(path)))


def refused(error: type[HsError], *inputs: Path, out: Path, **options: Any) -> list[tuple[str, str]]:
    before = sorted(out.rglob("*")) if out.exists() else None
    with pytest.raises(error) as e:
        merge_stores(inputs, out, **options)
    assert (sorted(out.rglob("*")) if out.exists() else None) == before
    return [(p.code, p.severity.value) for p in e.value.problems]


def errors(path: Path) -> list[str]:
    return [str(p) for p in validate_store(path, level="full") if p.severity is Severity.ERROR]


def test_stores_of_two_codecs(a: Path, b: Path, tmp_path: Path) -> None:
    out = tmp_path / "c"
    report = merge_stores([a, b], out)
    assert report.exit_code == 0
    assert report.copied == [*names(a), *names(b)]
    assert (report.records, report.nbytes) == (6, hs.open(a).nbytes + hs.open(b).nbytes)
    for source in (a, b):
        for segment in names(source):
            for file in (source / "segments" / segment).rglob("*"):
                copy = out / file.relative_to(source)
                assert copy.is_dir() or copy.read_bytes() == file.read_bytes()
                assert copy.is_dir() or copy.stat().st_ino != file.stat().st_ino
    store = hs.open(out)
    assert store.contract.codec == "compact"
    for record in RECORDS:
        assert_same_record(store[record.id], record)
    assert errors(out) == []
    whole = write(tmp_path / "whole", RECORDS)
    assert hs.content_digest(store) == hs.content_digest(hs.open(whole))
    with hs.append(out) as writer:
        assert set(writer.ids) == {r.id for r in RECORDS}


def test_the_same_segment_in_two_stores_comes_once(a: Path, b: Path, tmp_path: Path) -> None:
    shutil.copytree(a, tmp_path / "copy")
    report = merge_stores([a, tmp_path / "copy", b], tmp_path / "c")
    assert report.copied == [*names(a), *names(b)]


def test_again_and_into_a_store_that_is_there(a: Path, b: Path, tmp_path: Path) -> None:
    out = tmp_path / "c"
    merge_stores([a], out)
    stamp = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    report = merge_stores([a, b], out)
    assert (report.present, report.copied) == (names(a), names(b))
    assert {p: p.stat().st_mtime_ns for p in stamp} == stamp
    again = merge_stores([b, a], out)
    assert (again.present, again.copied, again.exit_code) == (names(out), [], 0)


def test_what_an_earlier_copy_left_is_used_or_written_again(a: Path, tmp_path: Path) -> None:
    out, (name, _) = tmp_path / "c", names(a)
    shutil.copytree(a, out)
    (out / "segments" / name / "zarr.json").unlink()
    whole, cut, flipped = (out / "segments" / name / f"hidden/{k}/c/0/0" for k in ("d1", "d2", "d3"))
    cut.write_bytes(cut.read_bytes()[:-5])
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    stamp = whole.stat().st_mtime_ns
    assert merge_stores([a], out).copied == [name]
    assert whole.stat().st_mtime_ns == stamp
    assert errors(out) == []
    assert hs.content_digest(hs.open(out)) == hs.content_digest(hs.open(a))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tokenizer_digest": f"sha256:{'9' * 64}"}, "tokenizer_digest"),
        ({"target": {"vocab_size": 99}}, "target.vocab_size"),
        ({"captures": [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (1, 2, 3)] + [
            {"depth": 4, "norm": "final", "dtype": "bfloat16"}],
          "layout": {"aux": ["d1", "d2", "d3"], "last": "d4n"}}, "captures[3].norm"),
    ],
)  # fmt: skip
def test_other_meaning_is_refused_with_the_difference(a: Path, tmp_path: Path, changes: Any, path: str) -> None:
    other = tiny_contract(**changes)
    write(tmp_path / "o", [tiny_record(other, "x")], other)
    with pytest.raises(StoreError) as e:
        merge_stores([a, tmp_path / "o"], tmp_path / "c")
    (p,) = e.value.problems
    assert (p.code, p.where.endswith(path)) == ("HS507", True)
    assert ("--apply-final-norm" in p.fix) == ("norm" in path)
    assert not (tmp_path / "c").exists()


def test_name_revision_and_layout_are_noted(a: Path, tmp_path: Path) -> None:
    other = tiny_contract(target={"name": "b", "revision": "v2"}, layout={"aux": ["d1", "d3"], "last": "d4"})
    write(tmp_path / "o", [tiny_record(other, "x")], other)
    report = merge_stores([a, tmp_path / "o"], tmp_path / "c")
    assert {p.severity for p in report.problems} == {Severity.NOTE}
    assert {p.where.rpartition(": ")[2] for p in report.problems} == {"target.name", "target.revision", "layout.aux"}
    assert hs.open(tmp_path / "c").contract == CONTRACT


def field(**changes: Any) -> dict[str, Any]:
    return {"name": "weight", "axis": "token", "dtype": "float32", "shape": [], "must_understand": False} | changes


def test_field_that_not_all_have_is_left_out_and_its_array_stays(a: Path, tmp_path: Path) -> None:
    other = tiny_contract(fields=[field(), field(name="label", axis="record")])
    write(tmp_path / "o", [tiny_record(other, "x")], other)
    third = tiny_contract(fields=[field(name="label", axis="record"), field(dtype="int8")])
    write(tmp_path / "t", [tiny_record(third, "y")], third)
    report = merge_stores([tmp_path / "o", tmp_path / "t"], tmp_path / "c")
    store = hs.open(tmp_path / "c", understands=["label"])
    assert [f.name for f in store.contract.fields] == ["label"]
    assert "fields.weight" in {p.where for p in report.problems}
    assert list(store["x"].fields) == ["label"]
    assert list(tmp_path.glob("c/segments/*/fields/weight/zarr.json"))
    assert errors(tmp_path / "c") == []
    merge_stores([tmp_path / "o", a], tmp_path / "d")
    assert hs.open(tmp_path / "d").contract.fields == ()
    assert errors(tmp_path / "d") == []
    assert refused(StoreError, a, out=tmp_path / "o") == [("HS507", "error")] * 2


def test_field_that_must_be_understood_binds(a: Path, tmp_path: Path) -> None:
    other = tiny_contract(fields=[field(must_understand=True)])
    write(tmp_path / "o", [tiny_record(other, "x")], other)
    assert refused(StoreError, a, tmp_path / "o", out=tmp_path / "c") == [("HS507", "error")]


def test_id_of_two_stores(a: Path, tmp_path: Path) -> None:
    younger = tiny_record(CONTRACT, "r1", seed=77)
    write(tmp_path / "o", [younger, RECORDS[5]])
    assert refused(StoreError, a, tmp_path / "o", out=tmp_path / "c") == [("HS107", "error")]
    report = merge_stores([a, tmp_path / "o"], tmp_path / "c", dedupe=True)
    assert report.exit_code == 0
    assert report.repair is not None
    store = hs.open(tmp_path / "c")
    assert sorted(store.ids) == ["r0", "r1", "r2", "r5"]
    assert_same_record(store["r1"], RECORDS[1])
    digest = hs.content_digest(store)
    assert merge_stores([a, tmp_path / "o"], tmp_path / "c", dedupe=True).exit_code == 0
    assert hs.content_digest(hs.open(tmp_path / "c")) == digest


def test_segment_that_was_replaced_for_its_duplicates_stays_replaced(a: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "o", [RECORDS[5], RECORDS[4], tiny_record(CONTRACT, "r1", seed=77)])
    merge_stores([a, other], tmp_path / "c", dedupe=True)
    ids = sorted(hs.open(tmp_path / "c").ids)
    again = merge_stores([a, other], tmp_path / "c")
    assert (again.copied, again.replaced, again.exit_code) == ([], [names(other)[1]], 0)
    assert sorted(hs.open(tmp_path / "c").ids) == ids == ["r0", "r1", "r2", "r4", "r5"]


def damaged(path: Path) -> tuple[str, str, list[str]]:
    """Repair a flipped bit; return the segment that was replaced, the one that replaces it, and what was lost."""
    shard = path / "segments" / names(path)[1] / "hidden/d2/c/0/0"
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(data)
    report = repair_store(path)
    (segment,) = report.segments
    return segment.segment, segment.successor or "", report.lost


def test_replaced_segments_are_not_copied(tmp_path: Path, b: Path) -> None:
    a = write(tmp_path / "x", RECORDS[:3], chunk_tokens=4)
    old, new, lost = damaged(a)
    assert lost == ["r1"]
    report = merge_stores([a, b], tmp_path / "c")
    assert set(names(tmp_path / "c")) == {*names(a), *names(b)} - {old}
    assert new in report.copied
    assert hs.content_digest(hs.open(tmp_path / "c")) == hs.content_digest(hs.open(merged_by_hand(a, b, tmp_path)))


def merged_by_hand(a: Path, b: Path, tmp_path: Path) -> Path:
    with hs.create(tmp_path / "hand", CONTRACT) as writer:
        for record in (*hs.open(a), *hs.open(b)):
            writer.append(record)
    return tmp_path / "hand"


def test_segment_that_is_replaced_in_one_store_and_in_use_in_another(tmp_path: Path) -> None:
    a = write(tmp_path / "x", RECORDS[:3], chunk_tokens=4)
    good = shutil.copytree(a, tmp_path / "good")
    old, _, _ = damaged(a)
    for inputs in ((a, good), (good, a)):
        assert refused(StoreError, *inputs, out=tmp_path / "c") == [("HS506", "error")]
    with hs.append(a) as writer:
        writer.append(RECORDS[1])
    report = merge_stores([good, a], tmp_path / "c")
    assert report.replaced == [old]
    assert sorted(hs.open(tmp_path / "c").ids) == ["r0", "r1", "r2"]


def test_two_segments_of_one_name(a: Path, tmp_path: Path) -> None:
    other = shutil.copytree(a, tmp_path / "o")
    file = other / "segments" / names(a)[0] / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))
    assert refused(StoreError, a, other, out=tmp_path / "c") == [("HS507", "error")]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda f: f.unlink(), "HS503"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "HS505"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\0"), "HS504"),
    ],
)
def test_damaged_segment_is_left_out_and_said(a: Path, b: Path, tmp_path: Path, damage: Any, code: str) -> None:
    damage(a / "segments" / names(a)[0] / "hidden/d3/c/0/0")
    report = merge_stores([a, b], tmp_path / "c")
    assert ([p.code for p in report.problems if p.severity is Severity.ERROR], report.exit_code) == ([code], 1)
    assert names(tmp_path / "c") == [names(a)[1], *names(b)]
    assert (report.records, errors(tmp_path / "c")) == (5, [])


def test_damaged_commit_record_and_no_store_are_refused(a: Path, b: Path, tmp_path: Path) -> None:
    (a / "segments" / names(a)[0] / "zarr.json").write_text("{")
    assert refused(StoreError, b, a, out=tmp_path / "c") == [("HS504", "error")]
    assert refused(StoreError, b, tmp_path / "none", out=tmp_path / "c") == [("HS501", "error")]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    assert refused(StoreError, b, out=tmp_path / "full") == [("HS501", "error")]
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_stores([], tmp_path / "c")


def test_full_disk(a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: LocalBackend, key: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalBackend, "create", full)
    with pytest.raises(StoreError) as e:
        merge_stores([a], tmp_path / "c")
    assert [(p.code, p.severity) for p in e.value.problems] == [("HS506", "error")]
    monkeypatch.undo()
    assert merge_stores([a], tmp_path / "c").copied == names(a)


# --- the final norm


def model_contract(family: str, folder: Path, dtype: str) -> tuple[Contract, Any]:
    """Return the contract of a tiny model, captures d2 and d4, and the model's own final norm."""
    tiny = save_tiny(family, folder)
    target = tiny.target.model_dump(mode="json") | {
        "basis_digest": basis_digest(key_tensors(folder))[0],
        "vocab_size": 96,
    }
    contract = tiny_contract(
        target=target,
        captures=[{"depth": d, "norm": "none", "dtype": dtype} for d in (2, LAYERS)],
        layout={"aux": ["d2"], "last": f"d{LAYERS}"},
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return contract, model.transformer.ln_f if family == "gpt2" else model.model.norm


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_final_norm_is_that_of_the_model(tmp_path: Path, family: str, dtype: str) -> None:
    contract, module = model_contract(family, tmp_path / "model", dtype)
    records = [tiny_record(contract, f"r{i}", tokens=6, seed=i) for i in range(3)]
    for r in records:
        r.hidden[f"d{LAYERS}"] = (to_float32(r.hidden[f"d{LAYERS}"]) * 7 + 1).astype(r.hidden["d2"].dtype)
    before = write(tmp_path / "before", records, contract)
    report = merge_stores([before], tmp_path / "after", final_norm=tmp_path / "model")
    assert (len(report.converted), report.copied, report.exit_code) == (2, [], 0)
    store = hs.open(tmp_path / "after")
    assert store.contract.keys == ("d2", f"d{LAYERS}n")
    assert store.contract.layout.last == f"d{LAYERS}n"
    assert errors(tmp_path / "after") == []
    for r in records:
        got = store[r.id]
        assert got.hidden["d2"].tobytes() == r.hidden["d2"].tobytes()
        with torch.no_grad():
            want = module(torch.from_numpy(to_float32(r.hidden[f"d{LAYERS}"]))).numpy()
        found = got.hidden[f"d{LAYERS}n"]
        assert found.dtype == (BFLOAT16 if dtype == "bfloat16" else np.float32)
        tolerance = 2.0**-8 if dtype == "bfloat16" else 2e-6  # half a unit in the last place of a bfloat16
        np.testing.assert_allclose(to_float32(found), want, rtol=tolerance, atol=1e-6)
        if dtype == "bfloat16":
            assert np.mean(found == want.astype(BFLOAT16)) > 0.99
    (commit, *_) = store.segments
    assert commit.producer is not None
    assert commit.producer["apply_final_norm"]["segment"] == hs.open(before).segments[0].name
    again = merge_stores([before], tmp_path / "after", final_norm=tmp_path / "model")
    assert (again.converted, again.present) == ([], names(tmp_path / "after"))


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Contract, Path]:
    return model_contract("llama", tmp_path / "model", "bfloat16")[0], tmp_path / "model"


def test_stores_before_and_after_the_norm(tmp_path: Path, llama: tuple[Contract, Path]) -> None:
    contract, model = llama
    normed = normed_contract(contract)
    assert normed is not None
    assert normed_contract(normed) is None
    before = write(tmp_path / "before", [tiny_record(contract, "x"), tiny_record(contract, "y", seed=1)], contract)
    after = write(tmp_path / "after", [tiny_record(normed, "z", seed=2)], normed)
    assert refused(StoreError, before, after, out=tmp_path / "c")[0][0] == "HS507"
    assert refused(StoreError, before, out=after)[0][0] == "HS507"
    for name, inputs in (("c", [before, after]), ("d", [after, before])):
        report = merge_stores(inputs, tmp_path / name, final_norm=model)
        assert (len(report.converted), report.copied) == (2, names(after))
        assert hs.open(tmp_path / name).contract == normed
    assert hs.content_digest(hs.open(tmp_path / "c")) == hs.content_digest(hs.open(tmp_path / "d"))
    # The way back does not exist: a store that has it before the norm takes none that has it after.
    assert refused(StoreError, after, out=before, final_norm=model)[0][0] == "HS507"


def test_conversion_follows_what_was_replaced(tmp_path: Path, llama: tuple[Contract, Path]) -> None:
    contract, model = llama
    records = [tiny_record(contract, f"r{i}", tokens=8, seed=i) for i in range(3)]
    before = write(tmp_path / "before", records, contract, chunk_tokens=4)
    merge_stores([before], tmp_path / "c", final_norm=model)
    digest = hs.content_digest(hs.open(tmp_path / "c"))
    damaged(before)
    assert refused(StoreError, before, out=tmp_path / "c", final_norm=model) == [("HS506", "error")]
    with hs.append(before) as writer:
        writer.append(records[1])
    report = merge_stores([before], tmp_path / "c", final_norm=model)
    assert len(report.replaced) == 1
    assert hs.content_digest(hs.open(tmp_path / "c")) == digest


def test_another_model_is_refused(tmp_path: Path, llama: tuple[Contract, Path]) -> None:
    contract, _ = llama
    before = write(tmp_path / "before", [tiny_record(contract, "x")], contract)
    save_tiny("qwen3", tmp_path / "other")
    assert refused(ContractMismatch, before, out=tmp_path / "c", final_norm=tmp_path / "other") == [("HS301", "error")]
    assert refused(HsError, before, out=tmp_path / "c", final_norm=tmp_path / "none")[0][0] == "HS602"


def test_norm_that_would_change_what_a_draft_is_fed(tmp_path: Path, llama: tuple[Contract, Path]) -> None:
    contract, model = llama
    aux = contract.model_copy(update={"layout": contract.layout.model_copy(update={"aux": ("d2", f"d{LAYERS}")})})
    before = write(tmp_path / "before", [tiny_record(aux, "x")], aux)
    assert refused(ContractMismatch, before, out=tmp_path / "c", final_norm=model) == [("HS405", "error")]


def test_state_that_does_not_fit_after_the_norm(tmp_path: Path) -> None:
    contract, _ = model_contract("llama", tmp_path / "model", "float16")
    norm = load_final_norm(contract, tmp_path / "model", where="here")
    norm.weight_H[:] = 60000
    states = np.zeros((1, HIDDEN), np.float32)
    states[0, 0] = 1
    assert norm.apply(states).max() > 65504
    records = [tiny_record(contract, "x")]
    before = write(tmp_path / "before", records, contract)
    import hsformat.maintain.plan as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_final_norm", lambda *_, **__: norm)
        report = merge_stores([before], tmp_path / "c", final_norm=tmp_path / "model")
    assert ({p.code for p in report.problems}, report.exit_code, report.records) == ({"HS207"}, 1, 0)
    assert names(tmp_path / "c") == []


def test_command(a: Path, b: Path, tmp_path: Path, llama: tuple[Contract, Path]) -> None:
    run = CliRunner().invoke
    done = run(app, ["merge", str(a), str(b), "--out", str(tmp_path / "c")])
    assert done.exit_code == 0
    assert "6 record(s); segments copied 4, converted 0, there already 0" in done.stdout
    again = run(app, ["merge", str(a), "--out", str(tmp_path / "c"), "--format", "json"])
    assert (json.loads(again.stdout)["present"], again.exit_code) == (names(tmp_path / "c"), 0)
    wrong = run(app, ["merge", str(a), "--out", str(tmp_path / "d"), "--apply-final-norm"])
    assert (wrong.exit_code, (tmp_path / "d").exists()) == (2, False)
    contract, model = llama
    write(tmp_path / "before", [tiny_record(contract, "x")], contract)
    arguments = ["merge", str(tmp_path / "before"), "--out", str(tmp_path / "n")]
    normed = run(app, [*arguments, "--apply-final-norm", "--target", str(model), "--format", "json"])
    assert (len(json.loads(normed.stdout)["converted"]), normed.exit_code) == (1, 0)
    commit, _ = load_commit(LocalBackend(str(tmp_path / "n")), names(tmp_path / "n")[0])
    assert commit is not None
