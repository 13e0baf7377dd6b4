"""States against the target's embedding and head (HS206, HS204), on tiny models with real safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import transformers
from conformance.tamper import flip_byte, segment
from tiny_models import VOCAB, TinyModel, request_for, save_tiny

import hsformat as hs
from hsformat.extraction import make_contract
from hsformat.record import Generation, Record, TokenSample
from hsformat.target import describe
from hsformat.target.describe import NORM_WEIGHT, UnknownFamily
from hsformat.target.ends import open_ends
from hsformat.validate import Level, Report, run
from hsformat_extractors.transformers import TransformersExtractor

pytestmark = pytest.mark.needs("torch")

TOKENIZER = Path(__file__).parents[1] / "data" / "tiny-llama" / "tokenizer.json"
GREEDY = Generation(mode="greedy", max_new_tokens=24)
KEYS = ("d0", "d1", "d2", "d3", "d4", "d4n")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tiny target, and records of all its depths that it generated."""

    tiny: TinyModel
    records: list[Record]

    def contract(self, *keys: str, last: str | None) -> hs.Contract:
        aux = tuple(int(k.strip("d")) for k in keys if k != last)
        how = {"d4": "pre", "d4n": "post", None: "none"}[last]
        digest = describe_tiny(self.tiny.folder).tokenizer_digest
        return make_contract(self.tiny.target, tokenizer_digest=digest, aux=aux, last=how, codec="fast")


def describe_tiny(folder: Path):
    """Describe a tiny model, whose family need not be in the table."""
    try:
        return describe(folder)
    except UnknownFamily:
        name = folder.name.split("-")[0]
        facts = save_tiny.__globals__["FAMILIES"][name][2]
        measured = {
            "final_norm": facts["norm"], "embedding_scale": facts.get("embedding", 1.0),
            "head_scale": facts.get("head", 1.0), "softcap": facts.get("softcap"), NORM_WEIGHT: name != "olmo",
        }  # fmt: skip
        return describe(folder, measured=measured)


def make(family: str, folder: Path, count: int = 12) -> Made:
    folder = folder / f"{family}-target"
    save_tiny(family, folder)
    shutil.copy(TOKENIZER, folder)
    tiny = TinyModel(folder=folder, target=describe_tiny(folder).model)
    rng = np.random.default_rng(3)
    prompts = [
        TokenSample(id=f"r{i}", input_ids=rng.integers(3, VOCAB, 20).astype(np.int32), loss_mask=np.zeros(20, np.uint8))
        for i in range(count)
    ]
    extractor = TransformersExtractor()
    extractor.load(request_for(tiny, *KEYS, generation=GREEDY, batch_tokens=600))
    records = {r.id: r for r in extractor.extract(prompts) if isinstance(r, Record)}
    # The longest answer first: some end early.
    ordered = sorted(records.values(), key=lambda r: (-r.num_tokens, r.id))
    assert len(ordered) == count
    return Made(tiny=tiny, records=ordered)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Callable[[str], Made]:
    folder = tmp_path_factory.mktemp("targets")
    return cache(lambda family: make(family, folder))


@pytest.fixture
def llama(targets) -> Made:
    return targets("llama")


def write(
    path: Path, made: Made, edit: Callable[[int, dict], object] | None = None, *keys: str, last: str | None
) -> Path:
    """Write the records with these captures; ``edit`` changes the arguments of a record by its number."""
    keys = keys or ("d0", "d2")
    with hs.create(path, made.contract(*keys, last=last)) as writer:
        for i, record in enumerate(made.records):
            a = {name: getattr(record, name) for name in Record.__slots__}
            if edit is not None:
                edit(i, a)
            writer.append(Record(**{**a, "hidden": {k: a["hidden"][k] for k in writer.contract.keys}}))
    return path


def check(store: Path, made: Made, level: Level = Level.SAMPLE) -> Report:
    return run(store, level=level, target=made.tiny.folder)


@pytest.mark.parametrize("last", ["d4", "d4n"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "gpt_neox", "cohere", "olmo"])
def test_true_states_of_every_kind_of_target(targets, tmp_path, family, last):
    """Scales, caps, layer norms, tied heads and families outside the table; nothing is found, much is compared."""
    made = targets(family)
    report = check(write(tmp_path / "s", made, last=last), made)
    assert report.problems == []
    rows = 16 * len(made.records) * 3  # of all captures, with the embedding or the final norm
    written = [int(r.loss_mask.sum()) for r in made.records]
    assert report.states_compared == rows + sum(min(16, n) for n in written)


def test_learned_positions_are_said_to_be_skipped(targets, tmp_path):
    made = targets("gpt2")
    (note,) = check(write(tmp_path / "s", made, last="d4"), made).problems
    assert (note.code, note.severity) == ("HS206", hs.Severity.NOTE)
    assert "hidden['d0']" in note.where


@pytest.mark.parametrize("level", [Level.SAMPLE, Level.FULL])
@pytest.mark.parametrize(("step", "word"), [(1, "early"), (-1, "late")])
def test_ids_of_one_record_are_shifted(llama, tmp_path, level, step, word):
    def edit(i, a):
        if i == 0:
            a["input_ids"] = np.roll(a["input_ids"], step)

    first, second = check(write(tmp_path / "s", llama, edit, last="d4"), llama, level).problems
    for p in (first, second):
        assert (p.code, p.severity, p.record) == ("HS206", hs.Severity.ERROR, llama.records[0].id)
        assert f"one place {word}" in p.got
    assert "hidden['d0'] token " in first.where
    assert "hidden['d4'] token " in second.where


@pytest.mark.parametrize(("step", "word"), [(1, "early"), (-1, "late")])
def test_ids_of_all_records_are_shifted(llama, tmp_path, step, word):
    def edit(i, a):
        a["input_ids"] = np.roll(a["input_ids"], step)

    first, second = check(write(tmp_path / "s", llama, edit, last="d4n"), llama).problems
    for p in (first, second):
        assert (p.code, p.record) == ("HS206", None)
        assert f"one place {word}" in p.got
    assert "12 of 12 records compared" in first.got


def test_states_of_another_record(llama, tmp_path):  # speculators#279: matched by order, not by id
    def edit(i, a):
        if i in (0, 1):
            a["hidden"] = llama.records[1 - i].hidden

    assert llama.records[0].num_tokens == llama.records[1].num_tokens
    ids = [llama.records[i].id for i in (0, 1)]
    found = check(write(tmp_path / "s", llama, edit, last="d4"), llama).problems
    assert sorted((p.code, p.record) for p in found) == sorted(("HS206", i) for i in ids * 2)
    for p in found:
        if "hidden['d0']" in p.where:
            other = llama.records[1 - ids.index(p.record)]
            token = int(p.where.rsplit(" ", 1)[1])
            assert p.got.startswith(f"row {other.input_ids[token]} of the embedding")


def test_one_wrong_id_names_its_position(llama, tmp_path):
    def edit(i, a):
        if i == 0:  # which rows are looked at is known to the check alone: every second token is another
            a["input_ids"] = a["input_ids"].copy()
            a["input_ids"][::2] = (a["input_ids"][::2] + 40) % VOCAB

    (p,) = check(write(tmp_path / "s", llama, edit, last=None), llama).problems
    token = int(p.where.rsplit(" ", 1)[1])
    assert token % 2 == 0
    assert p.got == f"row {llama.records[0].input_ids[token]} of the embedding (8 of 16 rows compared are wrong)"


def test_scale_of_the_embedding_is_lost(targets, tmp_path):  # Gemma: sqrt(hidden_size)
    made = targets("gemma2")

    def edit(i, a):
        a["hidden"] = {**a["hidden"], "d0": a["hidden"]["d0"] / 32**0.5}

    (p,) = check(write(tmp_path / "s", made, edit, last="d4"), made).problems
    assert p.got == "0.177 times what it should be (12 of 12 records compared)"
    assert p.expected.startswith("5.65685 x row ")


def test_another_depth_as_depth_0(llama, tmp_path):
    def edit(i, a):
        a["hidden"] = {**a["hidden"], "d0": a["hidden"]["d1"]}

    (p,) = check(write(tmp_path / "s", llama, edit, last="d4"), llama).problems
    assert p.code == "HS206"
    assert p.got == "no row of the embedding (12 of 12 records compared)"


def test_embedding_in_an_aux_slot(llama, tmp_path):
    """The seed fault: 74.7% accuracy, drafts garbage; captures [embed, 3, 31 | 59] under other names."""

    def all_records(i, a):
        h = a["hidden"]
        a["hidden"] = {**h, "d1": h["d0"], "d2": h["d1"], "d3": h["d2"]}

    (p,) = check(write(tmp_path / "all", llama, all_records, "d1", "d2", "d3", last="d4"), llama).problems
    assert (p.code, p.severity, p.record) == ("HS204", hs.Severity.ERROR, None)
    assert "hidden['d1']" in p.where

    def one_record(i, a):
        if i == 4:
            all_records(i, a)

    (p,) = check(write(tmp_path / "one", llama, one_record, "d1", "d2", "d3", last="d4"), llama).problems
    assert (p.code, p.record) == ("HS204", llama.records[4].id)


@pytest.mark.parametrize("held", ["d3", "d2"])
def test_another_depth_as_the_last(llama, tmp_path, held):
    def edit(i, a):
        a["hidden"] = {**a["hidden"], "d4": a["hidden"][held]}

    (p,) = check(write(tmp_path / "s", llama, edit, last="d4"), llama).problems
    assert (p.code, p.record) == ("HS206", None)
    assert "another depth (d3 stored as d4" in p.fix


@pytest.mark.parametrize(("last", "held"), [("d4n", "d4"), ("d4", "d4n")])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "olmo"])
def test_a_norm_too_many_or_too_few(targets, tmp_path, family, last, held):
    made = targets(family)

    def one(i, a):
        if i == 3:
            a["hidden"] = {**a["hidden"], last: a["hidden"][held]}

    def given(i, a):
        a["hidden"] = {**a["hidden"], last: a["hidden"][held]}
        a["provenance"] = a["provenance"].model_copy(update={"generation": Generation(mode="none")})

    found = check(write(tmp_path / "one", made, one, last=last), made).problems
    assert [(p.code, p.record) for p in found] == [("HS205", made.records[3].id)]
    (p,) = check(write(tmp_path / "all", made, given, last=last), made).problems
    assert (p.code, p.record) == ("HS205", None)
    assert "12 of 12 records" in p.got


def test_given_and_sampled_answers_are_not_the_argmax(llama, tmp_path):
    def edit(i, a):
        a["input_ids"] = np.roll(a["input_ids"], 1)
        generation = Generation(mode="none") if i % 2 else Generation(mode="sampled", max_new_tokens=24, seed=1)
        a["provenance"] = a["provenance"].model_copy(update={"generation": generation})

    report = check(write(tmp_path / "s", llama, edit, "d2", last="d4"), llama)
    assert report.problems == []
    assert report.states_compared == 12 * 16 * 2  # with the embedding's rows alone


def test_greedy_records_are_found_among_others(llama, tmp_path):
    def edit(i, a):
        if i != 0:
            a["provenance"] = a["provenance"].model_copy(update={"generation": Generation(mode="none")})
        a["input_ids"] = np.roll(a["input_ids"], 1)

    (p,) = check(write(tmp_path / "s", llama, edit, "d2", last="d4"), llama).problems
    assert p.record == llama.records[0].id


def test_sharded_target(llama, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.tiny.folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    shutil.copy(TOKENIZER, tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2

    def edit(i, a):
        if i == 0:
            a["input_ids"] = np.roll(a["input_ids"], 1)

    found = run(write(tmp_path / "s", llama, edit, last="d4"), level=Level.SAMPLE, target=tmp_path / "sharded").problems
    assert [(p.code, p.record) for p in found] == [("HS206", llama.records[0].id)] * 2


def test_another_target_is_told_once(llama, tmp_path):
    other = make("llama", tmp_path / "other", count=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(other.tiny.folder)
    model.get_output_embeddings().weight.data.mul_(1.5)
    model.save_pretrained(other.tiny.folder)
    report = check(write(tmp_path / "s", llama, last="d4"), other)
    assert [p.code for p in report.problems] == ["HS301"]
    assert report.states_compared == 0


@pytest.mark.parametrize(
    ("lost", "code"),
    [("model.safetensors", "HS411"), ("tokenizer.json", "HS602"), ("config.json", "HS602")],
)
def test_target_that_cannot_be_read_hides_no_other_problem(llama, tmp_path, lost, code):
    folder = Path(shutil.copytree(llama.tiny.folder, tmp_path / "target"))
    (folder / lost).unlink()
    store = write(tmp_path / "s", llama, last="d4")
    flip_byte(segment(store) / "hidden" / "d2" / "c" / "0" / "0", 40)
    report = run(store, level=Level.FULL, target=folder)
    assert {p.code for p in report.problems} == {code, "HS504"}
    assert report.states_compared is None
    assert report.records == 12


def test_damaged_states_are_told_once_and_the_rest_is_compared(llama, tmp_path):
    store = write(tmp_path / "s", llama, last="d4")
    flip_byte(segment(store) / "hidden" / "d2" / "c" / "0" / "0", 40)
    report = check(store, llama)
    assert {p.code for p in report.problems} == {"HS504"}
    assert len(report.problems) == len(set(report.problems))
    assert (report.states_compared or 0) >= 12 * 16 * 2


def test_metadata_compares_no_states(llama, tmp_path):
    def edit(i, a):
        a["input_ids"] = np.roll(a["input_ids"], 1)

    report = check(write(tmp_path / "s", llama, edit, last="d4"), llama, Level.METADATA)
    assert (report.problems, report.states_compared) == ([], None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "granite"])
def test_logits_are_those_of_the_model(targets, family):
    import torch

    made = targets(family)
    ends = open_ends(made.tiny.folder, made.tiny.target)
    record = made.records[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(made.tiny.folder)
    with torch.inference_mode():
        wanted = model(torch.tensor(record.input_ids.astype(np.int64))[None]).logits[0].numpy()
    blocks = list(ends.logit_blocks(ends.normed(record.hidden["d4"].astype(np.float32))))
    assert [first for first, _ in blocks] == [0]
    np.testing.assert_allclose(blocks[0][1], wanted, rtol=2e-4, atol=2e-4)
