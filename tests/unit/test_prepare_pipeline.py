"""From a file to samples: lengths, drops by reason, generation, ids and digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsformat.digests import digest_bytes
from hsformat.prepare import Preparation, load_tokenizer, prepare
from hsformat.problems import ExitCode, HsError
from hsformat.record import TokenSample

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tok() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture
def run(tmp_path, tok):
    def run(*rows: Any, tokenizer: Any = tok, **changes: Any) -> tuple[Preparation, list[TokenSample]]:
        path = tmp_path / "data.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
        options = {"vocab_size": 512, "max_length": 1024, "for_generation": False, **changes}
        preparation = prepare(path, tokenizer, **options)
        samples = list(preparation)
        s = preparation.summary
        assert s.rows == len(rows) == s.samples + s.dropped.total()
        assert s.samples == len(samples)
        assert s.tokens == sum(map(len, samples))
        assert s.supervised == sum(int(x.loss_mask.sum()) for x in samples)
        return preparation, samples

    return run


def chat(*contents: str, roles: str = "ua", **more: Any) -> dict[str, Any]:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    turns = roles if len(roles) == len(contents) else (roles * len(contents))[: len(contents)]
    return {"messages": [{"role": names[r], "content": c} for r, c in zip(turns, contents, strict=True)], **more}


def ids_row(n: int, supervised: range | None = None, **more: Any) -> dict[str, Any]:
    mask = [int(supervised is not None and i in supervised) for i in range(n)]
    return {"input_ids": [i % 400 for i in range(n)], "loss_mask": mask, **more}


# -- training


def test_samples_are_int32_and_uint8_with_provenance(run):
    _, (sample, given) = run(chat("hi", "yes", id="x"), ids_row(4, range(2, 4)), template_kwargs={"mood": 1})
    assert (sample.id, sample.input_ids.dtype, sample.loss_mask.dtype) == ("x", np.int32, np.uint8)
    template = (TINY / "chat_template.jinja").read_text("utf-8")
    assert sample.provenance.template_digest == digest_bytes((template.encode(),))
    assert sample.provenance.template_kwargs == {"mood": 1}
    assert sample.provenance.generation.mode == given.provenance.generation.mode == "none"
    assert (given.provenance.template_digest, given.provenance.template_kwargs) == (None, {})
    assert given.input_ids.tolist() == [0, 1, 2, 3]


def test_ids_and_mask_exceed_max_length_on_the_tag_path(run):  # speculators PR#690
    preparation, (rendered, given) = run(
        chat("hi", "word " * 2500), ids_row(5000, range(10, 5000)), max_length=4096, vocab_size=512
    )
    for sample in (rendered, given):
        assert sample.input_ids.shape == sample.loss_mask.shape == (4096,)
    assert preparation.summary.truncated == 2


def test_no_trainable_tokens_after_truncation(run):  # trl PR#6025, PR#3930
    preparation, samples = run(chat("word " * 200, "ok"), chat("hi", "ok"), max_length=64)
    assert len(samples) == 1
    assert preparation.summary.dropped == {"no-supervision-after-truncation": 1}
    assert preparation.summary.exit_code == ExitCode.CLEAN
    preparation, _ = run(chat("word " * 200, "ok"), max_length=64)
    assert preparation.summary.all_dropped
    assert [p.code for p in preparation.summary.all_problems] == ["HS103"]
    assert preparation.summary.exit_code == ExitCode.PROBLEMS


def test_mask_all_zeros_where_the_tags_mark_nothing(run):  # transformers#34172: MASK_EMPTY 3/3
    tagged = "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}" + CHATML
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = tagged
    preparation, _ = run(*(chat("hi", str(i)) for i in range(3)), tokenizer=tokenizer)
    (problem,) = preparation.summary.all_problems
    assert (problem.code, preparation.summary.exit_code) == ("HS103", ExitCode.PROBLEMS)
    assert "3 of 3" in problem.got
    assert "boundaries" in problem.fix


def test_dropped_by_reason(run):
    preparation, samples = run(
        chat("hi"), chat("hi", "yes"), chat("hi", "yes"), chat("a", "b", id=1), chat("a", "b", id="1"), ids_row(3)
    )
    assert len(samples) == 2
    assert preparation.summary.dropped == {"no-assistant-turn": 1, "duplicate": 2, "no-supervision": 1}
    assert preparation.summary.problems == []


def test_bad_rows_are_reported_and_the_rest_goes_on(run):
    preparation, samples = run(
        '{"messages": [{"role"', "3", {"text": "x"}, chat("a", "b", id="x"), chat("a", "c", id="x"),
        ids_row(3, range(3), id="y") | {"input_ids": [1, 2, 512]}, ids_row(3, range(3)) | {"input_ids": [1, -100, 2]},
        chat("a", "b", roles="au"), chat("ok", "ok"),
        tokenizer=_chatml(),
    )  # fmt: skip
    assert samples[0].id == "x"
    assert len(samples) == 2
    codes = ["HS602", "HS603", "HS603", "HS107", "HS105", "HS105", "HS303"]
    assert [p.code for p in preparation.summary.problems] == codes
    assert "line 6" in preparation.summary.problems[4].where
    assert preparation.summary.problems[4].record == "y"
    assert preparation.summary.exit_code == ExitCode.PROBLEMS


def _chatml() -> Any:
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = CHATML
    return tokenizer


def test_problems_are_bounded_and_all_counted(run):
    preparation, _ = run(*({"text": i} for i in range(150)))
    assert len(preparation.summary.problems) == 100
    assert preparation.summary.problem_counts == {"HS603": 150}
    assert any("150 problems" in line for line in preparation.summary.lines())


def test_ignored_keys_and_json(run):
    preparation, _ = run(chat("a", "b", source="web"), chat("a", "c", source="web", score=1))
    facts = json.loads(json.dumps(preparation.summary.to_dict()))
    assert facts["ignored_keys"] == {"source": 2, "score": 1}
    assert facts["samples"] == 2


def test_each_iteration_starts_anew(run):
    preparation, samples = run(chat("a", "b"), chat("a"))
    again = list(preparation)
    assert [s.source_digest for s in again] == [s.source_digest for s in samples]
    assert preparation.summary.rows == 2


def test_nothing_is_read_ahead(tmp_path, tok):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(chat("a", str(i))) + "\n" for i in range(50)), "utf-8")
    preparation = prepare(path, tok, vocab_size=512, max_length=None, for_generation=False)
    next(iter(preparation))
    assert preparation.summary.rows == 1


def test_source_digest_follows_length_template_tokenizer_and_data(run):  # SpecForge PR#115, Soup#1067
    def digest(**changes: Any) -> str:
        tokenizer = load_tokenizer(TINY)
        tokenizer.chat_template = changes.pop("template", CHATML)
        if changes.pop("retrained", False):
            tokenizer.add_tokens(["answer"])
        _, (sample,) = run(changes.pop("row", chat("hi", "the answer")), tokenizer=tokenizer, **changes)
        return sample.source_digest

    assert digest() == digest()
    length = len(run(chat("hi", "the answer"), tokenizer=_chatml())[1][0])
    others = [
        digest(max_length=length - 2),
        digest(template="{{ '<|endoftext|>' }}" + CHATML),
        digest(retrained=True),
        digest(row=chat("hi", "an answer")),
    ]
    assert len({digest(), *others}) == 5


# -- generation


def test_prompt_ends_in_the_generation_prompt_and_nothing_is_supervised(run, tok):
    preparation, samples = run(
        chat("a", "b", "c", "d"), chat("e"), chat("s", "u", roles="su"), chat("u", "a", "t", roles="uat"),
        for_generation=True,
    )  # fmt: skip
    texts = [tok.decode(s.input_ids) for s in samples]
    assert all(t.endswith("<|im_end|>\n<|im_start|>assistant\n") for t in texts)
    assert "b<|im_end|>" in texts[0]
    assert "d<|im_end|>" not in texts[0]
    assert not any(s.loss_mask.any() for s in samples)
    assert preparation.summary.answers_replaced == 1
    assert preparation.summary.all_problems == []


def test_prompt_too_long_is_dropped_not_cut(run):
    length = len(run(chat("word"), for_generation=True)[1][0])
    assert run(chat("word"), for_generation=True, max_length=length + 8, reserve=8)[1]
    preparation, _ = run(chat("word"), for_generation=True, max_length=length + 7, reserve=8)
    assert preparation.summary.dropped == {"prompt-too-long": 1}
    assert preparation.summary.exit_code == ExitCode.PROBLEMS


def test_generation_without_a_user_turn(run):
    preparation, _ = run(chat("s", "a", roles="sa"), ids_row(3, range(3)), for_generation=True)
    assert preparation.summary.dropped == {"no-user-turn": 2}


def test_generation_from_ids(run):
    preparation, (prompt, cut) = run(ids_row(5), ids_row(6, range(4, 6)), ids_row(7, range(2, 4)), for_generation=True)
    assert (len(prompt), len(cut)) == (5, 4)
    assert not cut.loss_mask.any()
    assert preparation.summary.answers_replaced == 1
    assert [p.code for p in preparation.summary.problems] == ["HS104"]


# -- arguments


@pytest.mark.parametrize("changes", [{"max_length": 0}, {"max_length": 8, "for_generation": True, "reserve": 8}])
def test_no_room_is_refused(run, changes):
    with pytest.raises(HsError) as e:
        run(chat("a", "b"), **changes)
    assert e.value.problems[0].code == "HS102"
