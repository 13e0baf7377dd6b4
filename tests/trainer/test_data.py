"""Several stores with weights, held-out records, and loaders that go on where they were."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from runs import AUX, contract_of, make_config, make_run, make_store, make_target

from hsformat.problems import ContractMismatch, HsError, NothingToOpen, Severity
from hsformat.record import Generation, Provenance
from hsformat.source import SegmentedSource
from hsformat.testing import digest, tiny_record
from hsformat_trainer.data import eval_loader, train_loader
from hsformat_trainer.gate import admit
from hsformat_trainer.held_out import is_held_out
from hsformat_trainer.mixture import MixedSource
from hsformat_trainer.same_tokens import same_tokens

pytestmark = pytest.mark.needs("torch")


def ids_of(loader):
    return [i for batch in loader for i in batch.ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    contract = contract_of(make_target(folder / "target"))
    make_store(folder / "a", contract, count=12)
    make_store(folder / "b", contract, count=10, first=100, segments=3)
    return folder


@pytest.fixture
def two(folder):
    """Stores ``a`` of r0..r11 and ``b`` of r100..r109; a function that makes a config on them."""

    def config(a=1.0, b=1.0, **changes):
        stores = [{"path": str(folder / "a"), "weight": a}, {"path": str(folder / "b"), "weight": b}]
        return make_config(folder, **{"stores": stores, "held_out": "none", **changes})

    return config


def test_every_training_record_once_and_only_the_layouts_captures(two):
    config = two(held_out=0.3)
    admitted = admit(config)
    batches = list(train_loader(config, admitted))
    assert all(tuple(b.hidden) == (*AUX, "d4") for b in batches)
    assert all(b.num_tokens <= config.batch_tokens for b in batches)
    trained = [i for b in batches for i in b.ids]
    held = ids_of(eval_loader(config, admitted))
    assert len(held) > 0
    assert Counter(trained + held) == Counter([f"r{i}" for i in (*range(12), *range(100, 110))])
    assert all(is_held_out(i, share=0.3, seed=config.seed) for i in held)
    assert eval_loader(two(), admit(two())) is None


def test_weights_are_passes_and_parts_of_passes(two):
    config = two(a=2.5, b=1.0)
    loader = train_loader(config, admit(config))
    total = Counter()
    for epoch in range(2):
        assert loader.epoch == epoch
        count = len(loader)
        batches = list(loader)
        assert count == len(batches) == loader.batches_of(epoch)
        seen = Counter(i for b in batches for i in b.ids)
        assert {seen[f"r{i}"] for i in range(100, 110)} == {1}
        assert Counter(seen[f"r{i}"] for i in range(12)) == {2: 6, 3: 6}
        total += seen
    assert {total[f"r{i}"] for i in range(12)} == {5}  # the other half in the other epoch


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.4)])
@pytest.mark.parametrize("stop", [0, 3])
def test_a_loader_goes_on_where_another_was(two, weights, stop):
    config = two(*weights, batch_tokens=40)
    admitted = admit(config)
    loader = train_loader(config, admitted)
    whole = [[b.ids for b in loader] for _ in range(2)]
    loader = train_loader(config, admitted)
    list(loader)  # epoch 0
    done = []
    if stop:
        for batch in loader:
            done.append(batch.ids)
            if len(done) == stop:
                break
    state = loader.state_dict()
    other = train_loader(config.model_copy(update={"workers": 2}), admit(config))
    other.load_state_dict(state)
    assert other.epoch == 1
    assert done + [b.ids for b in other] == whole[1]
    assert other.epoch == 2
    with pytest.raises(ValueError, match="weights were"):
        train_loader(two(3.0, 1.0), admit(two(3.0, 1.0))).load_state_dict(state)


def test_ranks_share_the_records(two):
    config = two(a=2.0)
    admitted = admit(config)
    parts = [ids_of(train_loader(config, admitted, rank=r, world_size=2)) for r in range(2)]
    assert Counter(parts[0] + parts[1]) == Counter(ids_of(train_loader(config, admitted)))


def test_a_share_stays_where_it_is_when_stores_grow(tmp_path):
    config = make_run(tmp_path)
    before = admit(config)
    contract = before.contract
    make_store(tmp_path / "more", contract, count=30, first=50)
    stores = [str(tmp_path / "more"), str(tmp_path / "data.hs.zarr")]  # more of them, in another order
    after = admit(make_config(tmp_path, stores=stores))
    own = {s.name: s for s in after.sources}[str(tmp_path / "data.hs.zarr")]
    assert own.held_out.tolist() == before.sources[0].held_out.tolist()
    assert own.train.tolist() == before.sources[0].train.tolist()
    share = np.mean([is_held_out(f"c-{i}", share=0.1, seed=1) for i in range(20_000)])
    assert 0.09 < share < 0.11


def test_held_out_by_ids(two, tmp_path):
    (tmp_path / "ids").write_text("r3\n\nr104\n")
    config = two(held_out=f"ids:{tmp_path / 'ids'}")
    admitted = admit(config)
    assert ids_of(eval_loader(config, admitted)) == ["r3", "r104"]
    assert not {"r3", "r104"} & set(ids_of(train_loader(config, admitted)))
    (tmp_path / "ids").write_text("r3\nr999\n")
    with pytest.raises(ContractMismatch) as refused:
        admit(config)
    assert "'r999'" in refused.value.problems[0].got
    with pytest.raises(NothingToOpen):
        admit(two(held_out=f"ids:{tmp_path / 'none'}"))


def test_a_file_or_a_store_that_holds_nothing_out_is_refused(two, tmp_path, folder):
    """The run had no evaluation and no best checkpoint, and nobody was told."""
    (tmp_path / "ids").write_text("\n \n")
    make_store(tmp_path / "none", contract_of(folder / "target"), count=0)
    (tmp_path / "long").write_text("r3\n")
    for given, changes, got in (
        (f"ids:{tmp_path / 'ids'}", {}, "no id"),
        (f"store:{tmp_path / 'none'}", {}, "no record"),
        (f"ids:{tmp_path / 'long'}", {"batch_tokens": 10}, "1 ids, of which none is of a record of at most 10 tokens"),
    ):
        with pytest.raises(ContractMismatch) as refused:
            admit(two(held_out=given, **changes))
        found = [p for p in refused.value.problems if p.severity is Severity.ERROR]
        assert [(p.code, p.got) for p in found] == [("HS102", got)]
        assert given.partition(":")[2] in found[0].where
        assert "--held-out none" in found[0].fix


def test_weights_for_which_no_record_comes(two):
    """A run of so many steps made none of them, for ever; a run of epochs ended at once."""
    with pytest.raises(ContractMismatch) as refused:
        admit(two(a=1e-3, b=1e-3))
    assert [(p.code, p.fix) for p in refused.value.problems] == [("HS102", "raise --weights")]
    (note,) = admit(two(a=1.0, b=0.04)).notes
    assert (note.code, note.severity) == ("HS102", Severity.WARNING)
    assert note.got == "weight 0.04 of 10 records: none in any epoch"
    assert admit(two(a=1.0, b=0.06)).notes == ()


def test_more_processes_than_records_are_refused(two):
    config = two(batch_tokens=10)
    with pytest.raises(HsError) as e:
        train_loader(config, admit(config), world_size=40)
    assert [p.code for p in e.value.problems] == ["HS102"]


def test_held_out_in_a_store_of_its_own(tmp_path):
    config = make_run(tmp_path, held_out=f"store:{tmp_path / 'test.hs.zarr'}")
    make_store(tmp_path / "test.hs.zarr", contract_of(tmp_path / "target"), count=3, first=40)
    admitted = admit(config)
    assert ids_of(eval_loader(config, admitted)) == ["r40", "r41", "r42"]
    assert len(ids_of(train_loader(config, admitted))) == 12


def test_a_record_that_is_trained_on_is_not_evaluated_on(tmp_path):
    config = make_run(tmp_path, held_out=f"store:{tmp_path / 'test.hs.zarr'}")
    make_store(tmp_path / "test.hs.zarr", contract_of(tmp_path / "target"), count=3, first=11)
    with pytest.raises(ContractMismatch) as refused:
        admit(config)
    (p,) = refused.value.problems
    assert (p.code, p.record) == ("HS107", "r11")


def test_records_that_are_too_long_are_counted(two):
    config = two(batch_tokens=10)
    admitted = admit(config)
    assert [(len(s.train), s.too_long) for s in admitted.sources] == [(6, 6), (6, 4)]
    assert sum("left out: 6 records" in line for line in admitted.lines()) == 1
    assert len(ids_of(train_loader(config, admitted))) == 12
    with pytest.raises(ContractMismatch) as refused:
        admit(two(batch_tokens=3))
    assert [p.code for p in refused.value.problems] == ["HS102"]


def test_mixed_origins_are_reported(tmp_path):
    target = make_target(tmp_path / "target")
    contract = contract_of(target)
    greedy = Provenance(generation=Generation(mode="greedy", max_new_tokens=8), template_digest=digest("a"))
    records = [tiny_record(contract, f"g{i}", seed=i, provenance=greedy) for i in range(3)]
    make_store(tmp_path / "data.hs.zarr", contract, records=[*records, tiny_record(contract, "given")])
    admitted = admit(make_config(tmp_path, held_out="none"))
    assert admitted.origins["generation"] == {"greedy, max_new_tokens 8": 3, "none": 1}
    assert any("mixed generation" in line for line in admitted.lines())
    (p,) = [p for p in admitted.notes if p.code == "HS303"]  # another template than the target's
    assert p.severity is Severity.WARNING


def test_evaluation_of_some_records_takes_them_from_everywhere(two):
    config = two(held_out=0.9)
    admitted = admit(config)
    whole = ids_of(eval_loader(config, admitted))
    some = ids_of(eval_loader(config, admitted, most=4))
    assert len(some) == 4
    assert set(some) < set(whole)
    assert any(i in ("r100", "r109") or int(i[1:]) >= 100 for i in some)
    parts = [ids_of(eval_loader(config, admitted, rank=r, world_size=2)) for r in range(2)]
    assert Counter(parts[0] + parts[1]) == Counter(whole)


class Plain:
    """A source of records that tells neither lengths nor segments."""

    def __init__(self, contract, records):
        self.contract, self._records = contract, records

    @property
    def ids(self):
        return [r.id for r in self._records]

    def __len__(self):
        return len(self._records)

    def read(self, key, *, captures=None):
        return self._records[key]


def test_any_source_of_records(tmp_path):
    config = make_run(tmp_path, held_out="none")
    contract = contract_of(tmp_path / "target")
    source = Plain(contract, [tiny_record(contract, f"p{i}", tokens=6 + i, seed=i) for i in range(5)])
    assert not isinstance(source, SegmentedSource)
    admitted = admit(config, sources=[("made while training", source, 2.0)])
    batches = list(train_loader(config, admitted))
    assert Counter(i for b in batches for i in b.ids) == Counter({f"p{i}": 2 for i in range(5)})
    record = source.read(0)
    packed = next(r for b in batches for r in b.unpack() if r.id == "p0")
    assert torch.equal(packed.input_ids, torch.from_numpy(record.input_ids.astype(np.int64)))


def test_a_mixed_source_reads_by_number(tmp_path):
    admitted = admit(make_run(tmp_path, held_out="none"))
    (s,) = admitted.sources
    rows = np.array([4, 1, 4], np.int64)
    mixed = MixedSource(admitted.contract, [(s.source, rows, s.train_tokens[rows])])
    assert list(mixed.ids) == ["r4", "r1", "r4"]
    assert [mixed.read(i, captures=()).id for i in range(3)] == ["r4", "r1", "r4"]
    assert mixed.segment_counts().sum() == 3
    with pytest.raises(KeyError, match="by number"):
        mixed.read("r4")
    with pytest.raises(IndexError):
        mixed.read(3)


def test_stores_of_another_meaning_are_refused(tmp_path):
    config = make_run(tmp_path)
    other = contract_of(tmp_path / "target", captures=("d1", "d2", "d3", "d4n"), last="d4n")
    make_store(tmp_path / "other", other, first=50)
    with pytest.raises(HsError) as refused:
        admit(make_config(tmp_path, stores=[*[s.path for s in config.stores], str(tmp_path / "other")]))
    assert "HS507" in {p.code for p in refused.value.problems}


def test_tokens_that_are_held_out_and_trained_on_under_another_id(folder, tmp_path):
    contract = contract_of(folder / "target")
    same, another = tiny_record(contract, "again", tokens=9, seed=0), tiny_record(contract, "new", tokens=9, seed=77)
    apart = make_store(tmp_path / "apart", contract, records=[same, another], segments=1)
    config = make_config(folder, stores=[str(folder / "a")], held_out=f"store:{apart}")
    admitted = admit(config)
    (p,) = admitted.notes
    assert (p.code, p.severity) == ("HS107", Severity.WARNING)
    assert p.got.startswith("1 record(s)")
    assert "'again' has those of 'r0'" in p.got
    (p,) = same_tokens(admitted.sources, most_read=4)  # r0, r4 and r8 of 9 tokens, and both of the other store
    assert (p.code, p.severity) == ("HS107", Severity.NOTE)
    assert "5 records" in p.got
    assert same_tokens(admitted.sources, most_read=5)[0].severity is Severity.WARNING
