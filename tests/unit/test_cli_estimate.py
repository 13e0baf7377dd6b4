"""``hsformat estimate`` against what ``hsformat extract`` then writes, and from numbers; disks too small for both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hsformat as hs
from hsformat.cli.reference import cli_commands, cli_options
from hsformat.store import local

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
NUMBERS = ("--tokens", 65536, "--records", 1, "--hidden-size", 2880, "--captures", 4, "--dtype", "bfloat16")


@pytest.fixture
def estimate(cli):
    """Return the facts of an estimate."""

    def run(*words: object) -> dict[str, Any]:
        code, out, _ = cli("estimate", *words, "--format", "json")
        facts = json.loads(out)
        assert facts["exit_code"] == code
        return facts

    return run


@pytest.fixture
def disk(monkeypatch):
    """Return a function that makes every file system say that so much is free."""

    def free(nbytes: int) -> None:
        usage = SimpleNamespace(total=10**12, used=0, free=nbytes)
        monkeypatch.setattr(local.shutil, "disk_usage", lambda path: usage)

    return free


def chat(i: int, answer: str | None = "Two words.") -> dict[str, Any]:
    turns = [{"role": "user", "content": f"Question {i}?"}]
    return {"id": f"q{i}", "messages": turns + ([{"role": "assistant", "content": answer}] if answer else [])}


@pytest.fixture
def data(tmp_path) -> Path:
    return rows(tmp_path, [chat(i, "word " * i) for i in range(1, 9)])


def rows(folder: Path, made: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in made), "utf-8")
    return path


def files(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file()]


def layout(data: Path, *words: object) -> list[object]:
    return ["--model", MODEL, "--data", data, "--layers", "2,4,5", *words]


def test_numbers_of_a_long_context(estimate, cli):  # SpecForge#426
    facts = estimate(*NUMBERS, "--codec", "fast")
    assert sum(facts["bytes"]["states"].values()) == 1_509_949_440
    assert facts["bytes"]["on_disk"] == pytest.approx(1.51e9, rel=0.01)
    assert (facts["records"], facts["segments"], facts["files"], facts["problems"]) == (1, 1, 33, [])
    out = cli("estimate", *NUMBERS)[1]
    assert "1.51 GB" in out
    assert "an estimate: states at 0.71" in " ".join(out.split())


def test_numbers_of_many_records(estimate):
    facts = estimate(*NUMBERS[:2], "--records", 30, *NUMBERS[4:], "--codec", "fast", "--generate", 10)
    assert (facts["records"], facts["tokens"], facts["tokens_of_prompts"]) == (30, 65536 + 300, 65536)
    assert "upper bound" in facts["basis"]["tokens"]
    least, most = facts["bytes"]["at_least"], facts["bytes"]["on_disk"]
    assert 65536 * 2880 * 8 < least < most


@pytest.mark.needs("torch")
def test_what_extract_then_writes_in_several_segments(estimate, cli, tmp_path):
    data = rows(tmp_path, [chat(i, "word " * 8 * i) for i in range(1, 17)])
    words = layout(data, "--out", tmp_path / "s", "--codec", "fast", "--segment-mib", 1)
    facts = estimate(*words)
    assert cli("extract", *words)[0] == 0
    store = hs.open(tmp_path / "s")
    assert facts["segments"] == len(store.segments) > 1
    assert facts["files"] == len(files(tmp_path / "s"))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("words", [(), ("--explode-turns",), ("--max-length", 24)])
def test_what_extract_then_writes(estimate, cli, data, tmp_path, words):
    out = tmp_path / "out.hs.zarr"
    facts = estimate(*layout(data, "--out", out, "--codec", "fast", *words))
    code, _, err = cli("extract", *layout(data, "--out", out, "--codec", "fast", *words))
    assert code == 0, err
    store = hs.open(out)
    assert (facts["records"], facts["tokens"], facts["segments"]) == (len(store), store.tokens, len(store.segments))
    assert facts["files"] == len(files(out))
    assert facts["captures"] == list(store.contract.keys)
    stored = sum(p.stat().st_size for p in files(out))
    assert facts["bytes"]["on_disk"] == pytest.approx(stored, rel=0.02)
    assert facts["bytes"]["at_least"] < stored
    assert facts["free"] == pytest.approx(shutil.disk_usage(tmp_path).free, abs=1 << 30)


@pytest.mark.needs("torch")
def test_what_extract_then_writes_with_compact(estimate, cli, data, tmp_path):
    facts = estimate(*layout(data))
    assert facts["codec"] == "compact"
    assert cli("extract", *layout(data, "--out", tmp_path / "s"))[0] == 0
    assert facts["files"] == len(files(tmp_path / "s"))
    assert facts["bytes"]["at_least"] < sum(p.stat().st_size for p in files(tmp_path / "s"))


@pytest.mark.needs("torch")
def test_generated_records_stay_below_the_upper_bound(estimate, cli, tmp_path):
    data = rows(tmp_path, [chat(i, None) for i in range(4)])
    words = layout(data, "--generate", 5, "--codec", "fast", "--out", tmp_path / "s")
    facts = estimate(*words)
    assert cli("extract", *words)[0] == 0
    store = hs.open(tmp_path / "s")
    assert facts["tokens_of_prompts"] < store.tokens <= facts["tokens"] == facts["tokens_of_prompts"] + 20
    # Chunks are filled up, which what is needed at least does not count.
    assert facts["bytes"]["at_least"] < store.nbytes
    assert estimate(*words)["records"] == 0  # all there


@pytest.mark.needs("torch")
def test_only_what_is_missing_counts(estimate, cli, data, tmp_path):
    out = tmp_path / "s"
    assert cli("extract", *layout(data, "--out", out))[0] == 0
    before = len(files(out))
    data.write_text(data.read_text() + json.dumps(chat(99)) + "\n")
    facts = estimate(*layout(data, "--out", out))
    assert (facts["records"], facts["already_stored"]) == (1, 8)
    assert cli("extract", *layout(data, "--out", out))[0] == 0
    assert facts["files"] == len(files(out)) - before


def test_drops_by_reason_and_exit_code_of_the_preparation(estimate, cli, tmp_path):
    data = rows(tmp_path, [chat(1), chat(2, None), chat(1)])
    facts = estimate(*layout(data))
    assert facts["preparation"]["dropped"] == {"no-assistant-turn": 1, "duplicate": 1}
    assert facts["records"] == 1
    code, out, _ = cli("estimate", *layout(data))
    assert (code, "no-assistant-turn 1" in out) == (0, True)
    assert estimate(*layout(rows(tmp_path, [chat(2, None)])))["exit_code"] == 1


def test_a_model_without_weights_is_enough(estimate, data, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(MODEL / "config.json", folder)
    facts = estimate("--model", folder, "--tokens", 1000, "--layers", "eagle3", "--last", "post")
    assert facts["captures"] == ["d2", "d4", "d5", "d8n"]
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    assert estimate("--model", folder, "--data", data, "--layers", "eagle3")["records"] == 8


def test_time_is_never_invented(estimate):
    facts = estimate(*NUMBERS)
    assert (facts["seconds"], facts["more_segments_by_time"]) == (None, None)
    assert "--tokens-per-second" in facts["basis"]["time"]
    assert facts["encoding_bytes_per_second"] > 0
    facts = estimate("--tokens", 9000, "--records", 30, *NUMBERS[4:], "--tokens-per-second", 10)
    assert facts["seconds"] == 900
    assert facts["more_segments_by_time"] == 900 // 120
    facts = estimate("--tokens", 9000, "--records", 30, *NUMBERS[4:], "--tokens-per-second", 10, "--commit-seconds", 0)
    assert facts["segments"] + facts["more_segments_by_time"] == 30


def test_time_from_operations(estimate, cli):
    words = ("--model", MODEL, "--layers", "2,4,5", "--tokens", 1000, "--records", 10)
    attention, feed_forward, pairs = 64 * 32 * (4 + 4 + 2 + 2), 3 * 64 * 160, 100 * 101 // 2
    operations = 10 * 8 * 2 * (100 * (attention + feed_forward) + 2 * 4 * 32 * pairs)
    facts = estimate(*words)
    assert (facts["operations"], facts["seconds"]) == (operations, None)
    text = " ".join(cli("estimate", *words)[1].split())
    assert f"{operations / 1e14 / 3600:.3g} hours for each 100 TFLOP/s that the engine sustains" in text
    assert estimate(*words, "--tflops", 1e-6)["seconds"] == pytest.approx(operations / 1e6)
    assert estimate(*words, "--tflops", 1e-6, "--tokens-per-second", 10)["seconds"] == 100  # what was measured wins
    written = estimate(*words, "--generate", 10)["operations"]
    longer = estimate("--model", MODEL, "--layers", "2,4,5", "--tokens", 1100, "--records", 10)["operations"]
    assert written - longer == 10 * 10 * 2 * 64 * 512  # the head, for each token that is written
    facts = estimate(*NUMBERS)
    assert (facts["operations"], "without --model" in facts["basis"]["time"]) == (None, True)


def test_every_option_is_used_or_refused(cli, data):
    model = ("--model", MODEL)
    for words in (
        (),
        ("--tokens", 5),
        (*NUMBERS, "--data", data),
        NUMBERS[:-2],
        ("--data", data, *NUMBERS[4:]),
        ("--data", data, *model),
        ("--tokens", 5, *model),
        ("--tokens", 5, *model, "--layers", "eagle3", "--captures", 4),
        ("--tokens", 5, *model, "--layers", "eagle3", "--hidden-size", 8),
        (*NUMBERS, "--layers", "2,3"),
        ("--tokens", 5, "--records", 6, *NUMBERS[4:]),
        (*layout(data), "--records", 2),
        (*NUMBERS, "--max-length", 5),
        (*NUMBERS, "--explode-turns"),
        (*NUMBERS, "--template-kwargs", '{"a": 1}'),
        (*layout(data), "--template-kwargs", "[]"),
        (*NUMBERS, "--tokens-per-second", 0),
        (*NUMBERS, "--tflops", 100),
    ):
        assert cli("estimate", *words)[0] == 2, words


def test_what_extract_takes_too_has_the_same_default():
    mine, its = ({o.text: o.default for o in cli_options(cli_commands()[name])} for name in ("estimate", "extract"))
    shared = {
        text for text in mine.keys() & its.keys() if text.split()[0] not in ("--data", "--model")
    }  # required there
    assert {"--codec compact|fast", "--segment-mib N", "--commit-seconds X", "--last pre|post|none"} <= shared
    assert [text for text in sorted(shared) if mine[text] != its[text]] == []


def test_problems_have_codes(cli, data, tmp_path):
    assert "HS304" in cli("estimate", *layout(data), "--layers", "99")[2]
    assert "HS602" in cli("estimate", "--model", tmp_path, "--tokens", 5, "--layers", "eagle3")[2]
    code, _, err = cli("estimate", *NUMBERS, "--out", "ftp://bucket/x")
    assert (code, "HS501" in err) == (2, True)
    shutil.copytree(MODEL, folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float64", "torch_dtype": "float64"}))
    code, _, err = cli("estimate", "--model", folder, "--tokens", 5, "--layers", "eagle3")
    assert (code, "HS603" in err) == (1, True)


@pytest.mark.needs("torch")
def test_too_small_a_disk(estimate, cli, data, tmp_path, disk):
    out = tmp_path / "s"
    words = layout(data, "--out", out, "--codec", "fast")
    disk(estimate(*words)["bytes"]["at_least"] - 1)
    facts = estimate(*words)
    assert ([p["code"] for p in facts["problems"]], facts["exit_code"]) == (["HS506"], 1)
    code, text, err = cli("extract", *words, "--format", "json")
    (p,) = json.loads(text)["problems"]
    assert (code, p) == (1, facts["problems"][0])
    assert p["severity"] == "error"
    assert not out.exists()
    code, text, err = cli("extract", *words, "--ignore-disk-space")
    assert (code, len(hs.open(out)), err.count("HS506")) == (0, 8, 1)
    code, text, err = cli("extract", *words)  # nothing is missing
    assert (code, "HS506" in err) == (0, False)
    disk(0)
    data.write_text(data.read_text() + json.dumps(chat(99)) + "\n")
    code, text, err = cli("extract", *words)
    assert (code, "HS506" in err, len(hs.open(out))) == (1, True, 8)


@pytest.mark.needs("torch")
def test_a_disk_that_may_be_too_small_is_said_at_once_and_once(cli, estimate, data, tmp_path, disk):
    words = layout(data, "--out", tmp_path / "s")
    disk(estimate(*words)["bytes"]["at_least"])
    code, out, err = cli("extract", *words)
    assert (code, err.count("warning HS506"), "8 records written" in out) == (0, 1, True)


def test_a_place_that_extract_refuses_is_refused(cli, data, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").write_text("x")
    for place in ("file", "full"):
        for words in (layout(data), NUMBERS):
            code, _, err = cli("estimate", *words, "--out", tmp_path / place)
            assert (code, "HS501" in err) == (2, True), (place, words)
    (tmp_path / "empty").mkdir()
    assert cli("estimate", *NUMBERS, "--out", tmp_path / "empty")[0] == 0
