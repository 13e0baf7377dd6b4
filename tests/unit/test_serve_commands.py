"""The commands of servers that ``vllm_serve`` and ``sglang_serve`` print, and those of their guides."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hsformat.target import describe
from hsformat_extractors.hosted import sglang_serve, vllm_serve
from hsformat_extractors.hosted.sglang_args import server_flags

REPOSITORY = Path(__file__).parents[2]
TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
LAYERS = describe(TINY).model.num_layers


def vllm(*words: str, captures: str = "d1,d2") -> int:
    return vllm_serve.main(
        [str(TINY), "--captures", captures, "--storage", "/mnt/hs", "--vllm-version", "0.32.0", *words]
    )


def sglang(*words: str, layers: str = "1,2") -> int:
    return sglang_serve.main(
        [str(TINY), "--layers", layers, "--staging", "/mnt/hs", "--engine-version", "0.5.23", *words]
    )


def assert_refused(capsys: pytest.CaptureFixture[str], code: str, *said: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error {code} ")
    for word in ("  where ", "  got ", "  expected ", "  fix ", *said):
        assert word in err


@pytest.mark.parametrize("captures", ["zz", "d2,", "", "d02", "d²", "2"])
def test_vllm_what_is_no_capture_is_told(captures, capsys):
    assert vllm(captures=captures) == 2
    assert_refused(capsys, "HS304", f"d{LAYERS}n")


def test_vllm_the_final_norm_is_at_the_last_depth_alone(capsys):
    assert vllm(captures=f"d2n,d{LAYERS}n") == 2
    assert_refused(capsys, "HS304", "capture d2n", f"depth {LAYERS} alone")


def test_sglang_objects_are_written_as_json():
    flags = server_flags({"a": {"b": None}, "c": [{"d": True}], "e": [[1]], "f": ["x", 2]})
    assert flags == ["--a", '{"b": null}', "--c", '[{"d": true}]', "--e", "[[1]]", "--f", "x", "2"]
