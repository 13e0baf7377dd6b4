"""Proving what is made of draft folders: every fact of a row that is wrong is noticed, on the rows of both engines.

The engine is a computation by a row; real ones are in tests/engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hsformat.engines.inspection import Rules
from hsformat.engines.profile import Measurement
from hsformat.engines.rows import CaptureRow, DraftRow, IdKey, IdReader
from hsformat.engines.table import capture_row
from hsformat.engines.targets import TargetFacts
from hsformat.problems import HsError
from hsformat_extractors.probes import tiny
from hsformat_extractors.probes.draft_math import Target, first_two_steps
from hsformat_extractors.probes.draft_proof import ServedDraft, _read, claimed_row, prove_drafts
from hsformat_extractors.probes.draft_trials import draft_trials

N = 9
ENGINES = {"vllm": "0.32.0", "sglang": "0.5.23"}
FACTS = TargetFacts(
    where="target", architecture="LlamaForCausalLM", num_layers=N, hidden_size=tiny.HIDDEN, vocab_size=tiny.VOCAB,
    max_positions=256, folder=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    shape = (len(tiny.PROMPT), tiny.HIDDEN)
    keys = [*(f"d{d}" for d in range(N + 1)), f"d{N}n"]
    states = {key: 5 * tiny.draw(key, *shape) for key in keys}
    return Target(
        states=states, embedding=tiny.draw("e", tiny.VOCAB, tiny.HIDDEN), head=tiny.draw("h", tiny.VOCAB, tiny.HIDDEN)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    for trial in draft_trials():
        tiny.write_draft(root / trial.name, trial.config("float32"), trial.tensors())
    return root


@pytest.fixture(scope="module")
def served(folders, target) -> dict[str, list[ServedDraft]]:
    """Return by engine what it makes of every folder."""
    return {engine: serve(folders, row_of(engine), engine, target) for engine in ENGINES}


def captures(engine: str) -> CaptureRow:
    return capture_row(engine, ENGINES[engine], "LlamaForCausalLM")


def serve(folders: Path, row: DraftRow, engine: str, target: Target) -> list[ServedDraft]:
    """Return what an engine that does exactly what a row says computes for every folder."""
    rules = Rules(
        engine=engine, version=ENGINES[engine], title=engine, captures=captures(engine), draft=row, aux=None,
        evidence="ran",
    )  # fmt: skip
    first = int((target.head @ target.states[f"d{N}n"][-1]).argmax())
    out = []
    for trial in draft_trials():
        logits, outcome = [tiny.draw(trial.name, 3, tiny.DRAFT_VOCAB)], None
        if trial.silent(row):
            logits = [tiny.draw(trial.name, 3, tiny.VOCAB)]  # the target's alone
        elif not trial.works(row) and trial.loud:
            logits, outcome = [], "KeyError: no such weight"
        reading = _read(folders / trial.name, rules, FACTS)
        if trial.works(row) and reading is not None:
            weights = load_file(folders / trial.name / "model.safetensors")
            steps = first_two_steps(reading, weights, target, tiny.PROMPT, first)
            logits = [np.zeros((3, 7), np.float32), *(np.float32(v)[None] for v in steps)]
        out.append(ServedDraft(trial=trial, folder=folders / trial.name, logits=logits, outcome=outcome))
    return out


def prove(
    served: list[ServedDraft], claim: DraftRow, engine: str, target: Target
) -> tuple[DraftRow, tuple[Measurement, ...]]:
    return prove_drafts(
        served, claim, captures(engine), engine=engine, facts=FACTS, target=target, tolerance=1e-3, source="test"
    )


def row_of(engine: str) -> DraftRow:
    """Return the claim with the one reader that runs on a CPU."""
    claim = claimed_row(engine)
    return DraftRow.model_validate({**dict(claim), "readers": claim.readers[-1:]})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_does_what_the_row_says_is_proved(engine, served, target):
    claim, true = claimed_row(engine), row_of(engine)
    row, figures = prove(served[engine], claim, engine, target)
    assert row.evidence == "proved"
    assert row.versions == (ENGINES[engine],)
    assert row.readers == true.readers  # of vLLM's two, the one that ran
    assert len(figures) == len(draft_trials())
    assert max(m.relative_error for m in figures if m.relative_error is not None) < 1e-5


_NOT_ASKED = {"loading", "versions", "source", "evidence", "layout", "architectures", "attention"}
OFF = {"keys": (), "combine": "first", "default": False}


def changed(row: DraftRow) -> dict[str, list[Any]]:
    """Return other values for every fact of a row."""

    def option(name: str, *others: dict[str, Any]) -> list[Any]:
        own = getattr(row, name).model_dump()
        return [v for v in (OFF, {**OFF, "default": True}, *others) if {**own, **v} != own]

    def reader(keys: Sequence[IdKey], **facts: Any) -> IdReader:
        return IdReader.model_validate({"name": "", "keys": tuple(keys), "positions": beyond, **facts})

    beyond = row.readers[0].positions
    top = {**OFF, "keys": ("norm_before_residual",)}
    places = [IdKey(path="eagle_aux_hidden_state_layer_ids", plus=0), *row.readers[0].keys[1:]]
    return {
        "readers": [
            *(
                [(reader(places[:1]),), (reader(row.readers[0].keys[-1:]),)]
                if len(row.readers[0].keys) > 1
                else [(reader(places),), (reader([*row.readers[0].keys, *places]),)]
            ),
            *((reader(row.readers[0].keys, positions=p),) for p in ("drafted", "not_drafted") if p != beyond),
        ],
        "count_keys": [(), (*row.count_keys, "eagle_aux_hidden_state_layer_ids")],
        "norm_before_residual": option("norm_before_residual", top),
        "norm_before_fc": option("norm_before_fc", {**OFF, "keys": ("norm_before_fc",)}),
        "fc_norm": option("fc_norm"),
        "norm_output": option("norm_output", {**OFF, "keys": ("norm_output", "eagle_config.norm_output")}),
        "attention_bias": option("attention_bias", {**OFF, "keys": ("attention_bias",)}),
        "output_bias": option("output_bias", {**OFF, "keys": ("attention_bias",)}, {**OFF, "keys": ("bias",)}),
        "mlp_bias": option("mlp_bias", {**OFF, "keys": ("mlp_bias",)}),
        "fc_bias": option("fc_bias", {**OFF, "keys": ("bias",)}),
        "embedding": [v for v in ("own", "target") if v[:3] != row.embedding[:3] and row.embedding != v],
        "tied_head": [{"ignored": "embedding", "embedding": "ignored"}[row.tied_head]],
        "full_vocabulary_map": [not row.full_vocabulary_map],
        "single_capture_skips_fc": [not row.single_capture_skips_fc],
        "max_layers": [1],
        "later_layers_norm": [{"input_layernorm", "hidden_norm"} - {row.later_layers_norm}],
        "weight_prefixes": [("",) if "model." in row.weight_prefixes else ("", "model.")],
        "layer_names": [("midlayer",), ("layers.0",)],
        "unknown_weights": [{"dropped": "refused", "refused": "dropped"}[row.unknown_weights]],
        "rope_layouts": [("rope_theta",)],
        "partial_rotary_keys": [
            () if "partial_rotary_factor" in row.partial_rotary_keys else ("partial_rotary_factor",)
        ],
        # Positions that all move by one give the same attention: of the shift, the token alone shows in logits.
        "shift": [{**row.shift.model_dump(), "token": 0}],
    }


CASES = [
    pytest.param(engine, name, other, id=f"{engine}-{name}-{i}")
    for engine in ENGINES
    for name, others in changed(row_of(engine)).items()
    for i, other in enumerate(others)
]


@pytest.mark.parametrize(("engine", "name", "other"), CASES)
def test_a_fact_that_is_wrong_is_noticed(engine, name, other, served, target):
    true = row_of(engine)
    if isinstance(other, set):
        (other,) = other
    claim = DraftRow.model_validate({**dict(true), name: other})
    assert claim != true
    with pytest.raises(HsError) as e:
        prove(served[engine], claim, engine, target)
    assert {p.code for p in e.value.problems} == {"HS410"}


def test_every_fact_of_a_row_is_changed_by_a_case_and_asked_by_a_trial():
    asked = {fact for trial in draft_trials() for fact in trial.facts}
    assert asked == set(DraftRow.model_fields) - _NOT_ASKED
    names = {c.values[1] for c in CASES}
    assert set(DraftRow.model_fields) - _NOT_ASKED - names == {"count_default", "head"}
