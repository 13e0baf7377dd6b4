"""Rows of a matrix read by their offset, and the ends of a target, without loading it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hsformat.problems import ForeignFileError
from hsformat.target import describe, rows
from hsformat.target.checkpoint import TensorInfo, read_checkpoint, read_header
from hsformat.target.ends import open_ends
from hsformat.target.rows import read_rows, row_blocks

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"


def matrix(path: Path, dtype: object = np.float32, shape: tuple[int, ...] = (300, 16)) -> tuple[TensorInfo, np.ndarray]:
    data = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    save_file({"a": np.ones(3, np.float32), "w": data, "z": np.ones(5, np.float16)}, path / "model.safetensors")
    (info,) = [i for i in read_header(path / "model.safetensors") if i.name == "w"]
    return info, data.astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_rows_and_blocks_are_those_of_the_tensor(tmp_path, monkeypatch, dtype):
    info, data = matrix(tmp_path, dtype)
    wanted = [7, 299, 0, 7, 7, 150]
    np.testing.assert_array_equal(read_rows(info, wanted), data[wanted])
    assert read_rows(info, []).shape == (0, 16)
    monkeypatch.setattr(rows, "BLOCK_BYTES", 4 * 16 * 64)
    blocks = list(row_blocks(info))
    assert [first for first, _ in blocks] == [0, 64, 128, 192, 256]
    np.testing.assert_array_equal(np.concatenate([b for _, b in blocks]), data)
    assert [len(b) for _, b in row_blocks(info, stop=70)] == [64, 6]
    assert [len(b) for _, b in row_blocks(info, stop=70, columns=32)] == [32, 32, 6]


def test_rows_that_there_are_not(tmp_path):
    info, _ = matrix(tmp_path)
    for wanted in ([-1], [300], [5, 10**12]):
        with pytest.raises(IndexError):
            read_rows(info, wanted)


def test_file_that_was_cut_or_is_quantised(tmp_path):
    info, _ = matrix(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as f:
        f.truncate(info.start + 100 * 64 + 5)
    for read in (lambda: read_rows(info, [2, 150]), lambda: list(row_blocks(info))):
        with pytest.raises(ForeignFileError) as e:
            read()
        assert [p.code for p in e.value.problems] == ["HS602"]
    (tmp_path / "q").mkdir()
    info, _ = matrix(tmp_path / "q", np.int8)
    with pytest.raises(ForeignFileError) as e:
        read_rows(info, [0])
    assert [p.code for p in e.value.problems] == ["HS411"]


def test_logits_of_a_large_vocabulary_take_bounded_memory(tmp_path):
    """A head of 200 MiB as float32; what is allocated at a time is two blocks and their product."""
    info, _ = matrix(tmp_path, ml_dtypes.bfloat16, (100_000, 512))
    ends = open_ends(TINY, describe(TINY).model)
    model = ends.model.model_copy(update={"vocab_size": 100_000, "hidden_size": 512})
    large = type(ends)(
        model=model, embedding=info, lm_head=info, norm_weight=None, norm_bias=None, head_bias=None
    )  # fmt: skip
    states = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    tracemalloc.start()
    count = sum(block.shape[1] for _, block in large.logit_blocks(large.normed(states)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 100_000
    assert peak < 5 * rows.BLOCK_BYTES


def test_rows_that_pad_the_head_have_no_logits():
    ends = open_ends(TINY, describe(TINY).model)
    cut = ends.model.model_copy(update={"vocab_size": 500})
    padded = type(ends)(
        model=cut,
        embedding=ends.embedding,
        lm_head=ends.lm_head,
        norm_weight=ends.norm_weight,
        norm_bias=None,
        head_bias=np.zeros(512, np.float32),
    )
    ((_, logits),) = padded.logit_blocks(np.ones((3, 64), np.float32))
    assert logits.shape == (3, 500)


def test_ends_of_a_folder_without_a_head(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    tensors = {
        n: np.ones(i.shape, np.float32) for n, i in read_checkpoint(TINY).tensors.items() if n != "lm_head.weight"
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ForeignFileError) as e:
        open_ends(tmp_path, describe(TINY).model)
    assert [p.code for p in e.value.problems] == ["HS411"]
