"""Pieces are the whole: the same ids as one pass of the tokenizer, and every cut that is claimed is one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hsformat.digests import canonical_json
from hsformat.prepare.pieces import Pieces
from hsformat.prepare.tokenizer import load_tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<|im_start|>x"]


def _metaspace(*, normalizer: Any, scheme: str) -> Any:
    """A Llama-2 or Mistral like tokenizer: a leading mark, bytes for what is unknown, tokens one of which begins
    another."""
    letters = "▁ab<|>imstartend_ofx\n "
    vocab = {t: i for i, t in enumerate(["<unk>", *dict.fromkeys(letters), "ab", "▁a", "▁▁", "<|"])}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("▁", "a"), ("▁", "▁"), ("<", "|")], unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if scheme:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tok = PreTrainedTokenizerFast(tokenizer_object=backend)
    tok.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tok


@cache
def tokenizer(name: str) -> Any:
    match name:
        case "bytes":
            return load_tokenizer(TINY)
        case "first":
            return _metaspace(normalizer=None, scheme="first")
        case "always":
            return _metaspace(normalizer=None, scheme="always")
        case "prepend":
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFC()]
            return _metaspace(normalizer=normalizers.Sequence(steps), scheme="")


texts = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, " ", "\n", "\n\n", "a", "ab", " a", "assistant\n", "<|", "é🙂"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
    max_size=10,
).map("".join)


@given(st.sampled_from(["bytes", "first", "always", "prepend"]), texts)
def test_pieces_and_cuts_are_those_of_the_whole(name, text):
    tok = tokenizer(name)
    pieces = Pieces.of(tok)
    assert pieces is not None
    made = pieces.encode(text)
    assert made.ids == tok(text, add_special_tokens=False)["input_ids"]
    for char in range(len(text) + 1):
        n = made.cut(char)
        if n is not None:
            assert made.ids[:n] == tok(text[:char], add_special_tokens=False)["input_ids"]


def test_cut_after_a_header_and_after_the_end_of_a_turn_is_found():
    pieces = Pieces.of(tokenizer("bytes"))
    assert pieces is not None
    text = "<|im_start|>assistant\nHello<|im_end|>\n"
    made = pieces.encode(text)
    assert all(made.cut(text.index(end)) is not None for end in ("<|im_start|>", "Hello", "<|im_end|>"))
    assert made.cut(len(text)) == len(made.ids)
    assert made.cut(len(text) - 1) == len(made.ids) - 1
    assert made.cut(len(text) - 3) is None


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_reach_beyond_themselves_have_no_pieces(flag):
    tok = load_tokenizer(TINY)
    tok.add_tokens([AddedToken("<x>", special=True, normalized=False, **{flag: True})])
    assert Pieces.of(tok) is None


def test_other_tokenizers_have_no_pieces():
    class Own(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    assert Pieces.of(Own(tokenizer_object=tokenizer("bytes").backend_tokenizer)) is None
    assert Pieces.of(object()) is None
    tok = load_tokenizer(TINY)
    tok.backend_tokenizer.encode_special_tokens = True
    assert Pieces.of(tok) is None


json_values = st.recursive(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.integers(2**53 - 2, 2**53 + 1),
        st.integers(-(2**53) - 1, -(2**53) + 2),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_that_of_rfc_8785(value):
    try:
        expected = rfc8785.dumps(value)
    except rfc8785.CanonicalizationError:  # an integer that is too large
        with pytest.raises(ValueError, match="exceeds"):
            canonical_json(value)
    else:
        assert canonical_json(value) == expected
