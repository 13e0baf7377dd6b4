"""Broken records: rules R."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
from conformance.breaches import FIELD, Breaches, refused
from conformance.tamper import (
    edit_commit,
    rewrite_array,
    segment,
)
from factories import tiny_contract, tiny_record

import hsformat as hs
from hsformat.record import Generation, Provenance

breaks = Breaches()


@breaks("R-1")
def mask_longer_than_ids(_store):
    return refused(loss_mask=np.ones(8, np.uint8))


@breaks("R-1")
def token_field_too_short(_store):
    return refused(contract=tiny_contract(fields=[FIELD]), fields={"weight": np.ones(6, np.float32)})


@breaks("R-2")
def captures_of_different_length(_store):
    return refused(hidden={"d2": np.ones((6, 8), np.float32)})


@breaks("R-2")
def one_state_less_and_not_generated(store):
    def edit(commit):
        commit["provenance"] = [Provenance().model_dump(mode="json")]

    shutil.rmtree(store)
    contract = tiny_contract()
    generated = Provenance(generation=Generation(mode="greedy", max_new_tokens=3))
    states = {k: np.ones((6, 8), np.float32) for k in contract.keys}
    with hs.create(store, contract) as writer:
        writer.append(tiny_record(contract, hidden=states, provenance=generated))
    assert hs.validate_store(store, level="full") == []
    edit_commit(store, edit)


@breaks("R-3")
def no_token(_store):
    return refused(tokens=0)


@breaks("R-4")
def nothing_supervised(store):
    rewrite_array(store, "loss_mask", np.zeros_like)


@breaks("R-5")
def mask_of_two(store):
    rewrite_array(store, "loss_mask", lambda m: m * 2)


@breaks("R-6")
def token_beyond_the_vocabulary(store):
    rewrite_array(store, "input_ids", lambda ids: ids + 100)


@breaks("R-6")
def ignored_index_as_token(store):
    rewrite_array(store, "input_ids", lambda ids: ids * 0 - 100)


@breaks("R-7")
def positions_that_fall(_store):
    return refused(position_ids=np.array([0, 1, 2, 1, 2, 3, 4]))


@breaks("R-7")
def positions_beyond_63_bits(_store):
    return refused(position_ids=np.arange(7, dtype=np.uint64) + np.uint64(2**63))


@breaks("R-8")
def one_id_by_two_writers(store):
    first, second = hs.append(store), hs.append(store)  # each knows what was committed when it was opened
    for writer in (first, second):
        writer.append(tiny_record(tiny_contract(), id="twice"))
        writer.close()


@breaks("R-8")
def empty_id(_store):
    return refused(id="")


@breaks("R-9")
def capture_left_out(store):
    def edit(commit):
        commit["files"] = {k: v for k, v in commit["files"].items() if not k.startswith("hidden/d2/")}

    shutil.rmtree(segment(store) / "hidden" / "d2")
    edit_commit(store, edit)


@breaks("R-10")
def nan_on_disk(store):
    def edit(h):
        h[3, 4] = np.nan
        return h

    rewrite_array(store, "hidden/d3", edit)


@breaks("R-11")
def zero_capture(store):
    rewrite_array(store, "hidden/d1", lambda h: h * 0)


@breaks("R-11")
def capture_of_depth_0_all_zero(_store):
    captures = [{"depth": d, "norm": "none", "dtype": "bfloat16"} for d in (0, 1, 2, 3, 4)]
    return refused(contract=tiny_contract(captures=captures), hidden={"d0": np.zeros((7, 8), np.float32)})


@breaks("R-12")
def overflow_of_float16(_store):
    captures = [{"depth": d, "norm": "none", "dtype": "float16"} for d in (1, 2, 3, 4)]
    return refused(contract=tiny_contract(captures=captures), hidden={"d2": np.full((7, 8), 7e4, np.float32)})


@breaks("R-12")
def float8_states(_store):
    return refused(hidden={"d2": np.ones((7, 8), ml_dtypes.float8_e4m3fn)})


@breaks("R-14")
def source_that_is_no_digest(_store):
    return refused(source_digest="banana")


@breaks("R-14")
def provenance_that_is_none(_store):
    return refused(provenance={"generation": {"mode": "none"}})


@breaks("R-13")
def another_width(_store):
    return refused(hidden={"d2": np.ones((7, 9), np.float32)})
