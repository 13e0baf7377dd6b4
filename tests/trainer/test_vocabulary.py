"""The draft's vocabulary, counted from ids and masks alone."""

from __future__ import annotations

import numpy as np
import pytest
from runs import contract_of, make_config, make_run, make_store, make_target

from hsformat.engines.vocabulary import check_map
from hsformat.store import Store
from hsformat.testing import tiny_record
from hsformat_trainer.gate import admit
from hsformat_trainer.vocabulary import make_vocabulary, vocabulary_for


def supervised(contract, id, ids, first, seed=0):
    """Return a record of these tokens, supervised from one on."""
    mask = np.zeros(len(ids), np.uint8)
    mask[first:] = 1
    return tiny_record(contract, id, tokens=len(ids), seed=seed, input_ids=np.array(ids, np.int32), loss_mask=mask)


def test_the_most_frequent_supervised_ids_and_special_ones(tmp_path, monkeypatch):
    target = make_target(tmp_path / "target", eos=(2,), special=(90, 7))
    contract = contract_of(target)
    records = [
        supervised(contract, "a", [50, 50, 50, 50, 11, 11, 12], 4),  # 50 is the prompt's: not counted
        supervised(contract, "b", [50, 50, 12, 12, 13], 2),
        supervised(contract, "c", [50, 11, 13, 14, 14, 14], 1),
    ]
    make_store(tmp_path / "data.hs.zarr", contract, records=records)
    admitted = admit(make_config(tmp_path, held_out="none", draft_vocab_size=6))
    read = []
    own = Store.read
    monkeypatch.setattr(
        Store, "read", lambda s, key, *, captures=None: read.append(captures) or own(s, key, captures=captures)
    )
    vocabulary = vocabulary_for(make_config(tmp_path, draft_vocab_size=6), admitted)
    assert vocabulary.target_ids.tolist() == [2, 7, 11, 12, 14, 90]
    assert [list(c) for c in read] == [[]] * 3  # never the states
    assert vocabulary.d2t.dtype == np.int64
    assert vocabulary.d2t.tolist() == [2, 6, 9, 9, 10, 85]  # offsets, not ids
    assert vocabulary.t2d.dtype == np.bool_
    assert np.flatnonzero(vocabulary.t2d).tolist() == [2, 7, 11, 12, 14, 90]
    assert check_map(vocabulary.d2t, vocabulary.t2d, size=6, total=100, where="") == []
    assert vocabulary.coverage == pytest.approx(9 / 11)  # 13 is outside


def test_weights_count(tmp_path):
    target = make_target(tmp_path / "target")
    contract = contract_of(target)
    for name, token in (("a", 30), ("b", 40)):
        records = [supervised(contract, f"{name}{i}", [1, token, token, token], 1) for i in range(4)]
        make_store(tmp_path / name, contract, records=records)
    stores = [{"path": str(tmp_path / "a"), "weight": 0.5}, {"path": str(tmp_path / "b"), "weight": 2.0}]
    config = make_config(tmp_path, stores=stores, held_out="none", draft_vocab_size=2)
    vocabulary = vocabulary_for(config, admit(config))
    assert vocabulary.target_ids.tolist() == [2, 40]
    assert vocabulary.coverage == pytest.approx(0.8)


def test_a_whole_vocabulary_has_no_map_even_beside_one(tmp_path):  # speculators PR#1081: a map was used unasked
    config = make_run(tmp_path)
    np.save(tmp_path / "data.hs.zarr" / "d2t.npy", np.zeros(10, np.int64))
    admitted = admit(config)
    assert vocabulary_for(config, admitted) is None
    assert admitted.spec.draft_vocab_size == 100
    assert admit(make_config(tmp_path, draft_vocab_size=100)).spec.draft_vocab_size == 100


# SafeAILab/EAGLE#248, #222: a map of 1746 ids beside a head of 32000
def test_fewer_ids_in_the_data_than_rows_of_the_head_are_filled_up():
    counts, others = np.zeros((2, 50_000))
    counts[10_000:11_746] = 1
    others[[40_000, 11_000]] = 5, 9  # of prompts
    vocabulary = make_vocabulary(counts, 32_000, always=(49_999,), others=others)
    assert len(vocabulary.d2t) == vocabulary.t2d.sum() == 32_000
    ids = vocabulary.target_ids
    assert bool((np.diff(ids) > 0).all())
    assert vocabulary.t2d[[10_000, 11_745, 49_999, 40_000]].all()
    assert vocabulary.filled == 32_000 - 1_747
    assert ids[:3].tolist() == [0, 1, 2]  # the earliest merges
    assert vocabulary.coverage == 1.0
    assert "30,253 of the ids are not supervised" in vocabulary.line
    assert check_map(vocabulary.d2t, vocabulary.t2d, size=32_000, total=50_000, where="") == []
    short = check_map(vocabulary.d2t[:1746], vocabulary.t2d, size=32_000, total=50_000, where="")
    assert {p.code for p in short} == {"HS408"}
    assert "1746" in short[0].got
    assert "32000" in short[0].expected


@pytest.mark.parametrize("size", [16, 20])
def test_another_size_is_another_map(tmp_path, size):  # SpecForge PR#602: a map of another size was used again
    config = make_run(tmp_path, draft_vocab_size=size)
    vocabulary = vocabulary_for(config, admit(config))
    assert len(vocabulary.d2t) == size == vocabulary.t2d.sum()
    assert bool((np.diff(vocabulary.target_ids) > 0).all())


def test_what_ends_a_text_is_inside_before_other_special_ids(tmp_path):
    special = range(10, 40)
    config = make_config(tmp_path, draft_vocab_size=3, held_out="none")
    target = make_target(tmp_path / "target", eos=(77,), special=special)
    make_store(tmp_path / "data.hs.zarr", contract_of(target), count=2)
    admitted = admit(config)
    assert admitted.special_ids == (77, *special)
    assert vocabulary_for(config, admitted).target_ids.tolist() == [10, 11, 77]


def test_equally_frequent_ids_are_chosen_alike_everywhere():
    vocabulary = make_vocabulary(np.ones(10), 4, always=(9,))
    assert vocabulary.target_ids.tolist() == [0, 1, 2, 9]
