"""Options as YAML and flags: each default in one place, nothing ignored, everything that is wrong said at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from runs import make_run

from hsformat_trainer.config import HeldOut, TrainConfig
from hsformat_trainer.configuration import ConfigError, load_config, read_yaml, to_yaml

NEEDED = {"stores": ["a"], "target": "t", "serve": ["vllm@0.32.0"], "out": "o"}


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def wrong(*arguments):
    with pytest.raises(ConfigError) as e:
        load_config(*arguments)
    return e.value.problems


def test_what_is_printed_gives_the_same_config(file):
    given = {**NEEDED, "lr": 3e-5, "held_out": "ids:file", "draft_rope": {"rope_type": "default", "rope_theta": 1e6}}
    config = TrainConfig.model_validate({**given, "stores": [{"path": "a", "weight": 0.5}, "b"], "clip": None})
    assert load_config(file(to_yaml(config)), {}) == config
    shown = yaml.safe_load(to_yaml(config))
    assert list(shown) == list(TrainConfig.model_fields)  # the whole of it
    for name, field in TrainConfig.model_fields.items():
        assert field.description, name
        assert f"# {field.description}" in to_yaml(config)


def test_flags_override_the_file(file):
    path = file("stores: [a]\ntarget: t\nserve: [vllm@0.32.0]\nout: o\nlr: 1e-4\nsteps: 5\n")
    config = load_config(path, {"steps": 3, "out": "elsewhere", "decay": None})
    assert (config.steps, config.out, config.lr, config.decay) == (3, "elsewhere", 1e-4, 0.8)


def test_one_value_where_a_list_is_wanted(file):
    """As with flags: ``serve: sglang@0.5.23`` is what anybody writes first."""
    path = file("stores: a,b\ntarget: t\nserve: vllm@0.32.0\nout: o\naux: d1, d2\ntrackers: tensorboard\n")
    config = load_config(path, {})
    assert [s.path for s in config.stores] == ["a,b"]  # a path may have a comma
    assert (config.serve, config.aux, config.trackers) == (("vllm@0.32.0",), ("d1", "d2"), ("tensorboard",))
    config = load_config(file("stores: {path: a, weight: 2}\ntarget: t\nserve: a@1,b@2\nout: o\n"), {})
    assert [(s.path, s.weight) for s in config.stores] == [("a", 2.0)]
    assert config.serve == ("a@1", "b@2")
    found = wrong(file("stores: 5\ntarget: t\nserve: {a: 1}\nout: o\naux: ''\n"), {})
    assert {(p.where.rpartition(": ")[2], p.expected) for p in found} >= {
        ("stores", "a list: [a, b]"),
        ("serve", "a list: [a, b]"),
    }
    assert {p.where.rpartition(": ")[2] for p in found} == {"stores", "serve", "aux"}


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "+1e-04", ".1e-3", "0.0001"])
def test_numbers_that_yaml_1_1_takes_for_text(file, text):
    path = file(f"stores: [a]\ntarget: t\nserve: [vllm@0.32.0]\nout: o\nlr: {text}\n")
    assert load_config(path, {}).lr == pytest.approx(1e-4)


def test_an_unknown_key_has_its_line_and_the_nearest_known(file):
    path = file("stores: [a]\ntarget: t\nserve: [vllm@0.32.0]\nout: o\nlearning_rte: 1\nnorm_befor_fc: true\n")
    found = wrong(path, {})
    assert [p.where for p in found] == [f"{path}, line 5: learning_rte", f"{path}, line 6: norm_befor_fc"]
    assert found[1].expected == "norm_before_fc?"
    (p,) = wrong(None, {**NEEDED, "stores": [{"path": "a", "wight": 2.0}]})
    assert p.expected == "weight?"


def test_everything_that_is_wrong_is_said_at_once(file):
    path = file("stores: [a]\nserve: []\nout: o\nlr: fast\nsteps: 0\ndecay: 2\nloss: mse\nepochs: 1.5\nseed: true\n")
    found = wrong(path, {"precision": "fp8"})
    names = {p.where.rpartition(": ")[2] for p in found}
    assert names == {"serve", "lr", "steps", "decay", "loss", "epochs", "seed", "target", "--precision"}
    assert {p.code for p in found} == {"HS603"}
    assert next(p for p in found if p.where.endswith("lr")).where == f"{path}, line 4: lr"
    assert "--target" in next(p for p in found if p.where == "target").fix


def test_a_key_that_is_there_twice_does_not_hide_the_rest(file):
    path = file("stores: [a]\ntarget: t\nserve: [vllm@0.32.0]\nout: o\nlr: 1\nlr: 2\nsteps: 0\n")
    found = wrong(path, {})
    assert [p.where for p in found] == [f"{path}, line 6: lr", f"{path}, line 7: steps"]
    assert found[0].fix == "leave one of the two"
    path = file("stores: [a]\ntarget: t\nserve: [vllm@0.32.0]\nout: o\nlr: 1\nlr: 2\n")
    assert len(wrong(path, {})) == 1


def test_anchors_that_stand_for_millions_of_values_are_refused(file):
    """Ten lines that are 10**8 strings written out: the process worked on them for minutes."""
    lines = ['a0: &a0 ["x","x","x","x","x","x","x","x","x","x"]']
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    path = file("\n".join([*lines, "stores: *a7", ""]))
    (p,) = wrong(path, {})
    assert (p.code, p.where) == ("HS602", path)
    assert "values" in p.got
    (p,) = wrong(file("stores: &a [*a]\n"), {})
    assert p.code == "HS602"


@pytest.mark.parametrize(("name", "value"), [("epochs", 10**24), ("workers", 10**9)])
def test_numbers_beyond_any_run_are_refused(name, value):
    (p,) = wrong(None, {**NEEDED, name: value})
    assert (p.code, p.where) == ("HS603", f"--{name}")


def test_what_is_named_twice_or_is_no_share_has_its_place(tmp_path, file):
    (p,) = wrong(None, {**NEEDED, "aux": "d1,d2,d1"})  # it ended with a traceback
    assert (p.where, p.expected) == ("--aux", "each capture once")
    (p,) = wrong(None, {**NEEDED, "out": "a\0b"})
    assert p.where == "--out"
    (p,) = wrong(None, {**NEEDED, "stores": [{"path": "a", "weight": -1.0}]})
    assert p.where == "STORE... and --weights"
    (p,) = wrong(None, {**NEEDED, "serve": ["vllm@1", "vllm@1"]})
    assert (p.where, p.expected) == ("--serve", "each engine of a version once")
    (tmp_path / "a").mkdir()
    (p,) = wrong(None, {**NEEDED, "stores": [str(tmp_path / "a"), f"{tmp_path}/a/"]})
    assert "each store once" in p.expected
    (p,) = wrong(None, {**NEEDED, "stores": ["s3://b/a", "s3://b/a/"]})
    (p,) = wrong(None, {**NEEDED, "held_out": "bla"})
    assert (p.where, p.got) == ("--held-out", "'bla'")
    assert p.expected == "a share of the records (0.05), ids:FILE, store:PATH, or none"
    path = file("stores: [a]\ntarget: t\nserve: [v@1]\nout: o\ninit: a\ndraft_config: b\n")
    assert [p.where for p in wrong(path, {})] == [path]


@pytest.mark.parametrize(
    "text",
    ["stores: [a\n", "- a\n", "stores: [a]\nstores: [b]\n", "lr: !!python/object/apply:os.system [true]\n", "a: \x00"],
)
def test_files_that_are_no_config(file, text):
    with pytest.raises(ConfigError) as e:
        read_yaml(file(text))
    assert e.value.problems[0].code in ("HS602", "HS603")


def test_held_out_in_words():
    def held(value):
        return TrainConfig.model_validate({**NEEDED, "held_out": value}).held_out

    assert held(0.1) == held("0.1") == held({"share": 0.1}) == HeldOut(share=0.1)
    assert held("none") == HeldOut(share=0.0)
    assert held("ids:a:b") == held({"ids": "a:b"}) == HeldOut(share=None, ids="a:b")
    assert held("store:s") == HeldOut(share=None, store="s")
    for value in ("much", 1.0, -0.1, {"share": 0.1, "ids": "x"}, True):
        with pytest.raises(ValueError, match="held_out"):
            held(value)


@pytest.mark.parametrize(
    "changes",
    [{"init": "a", "draft_config": "b"}, {"stores": ["a", "a"]}, {"serve": ["vllm@1", "vllm@1"]}, {"stores": []}],
)
def test_contradictions(changes):
    assert wrong(None, {**NEEDED, **changes})


def test_the_command_prints_the_config_and_takes_it(tmp_path, cli, file):
    config = make_run(tmp_path)
    words = ["train", config.stores[0].path, "--target", config.target, "--serve", "vllm@0.32.0,sglang@0.5.23"]
    words += ["--out", config.out, "--lr", "3e-4", "--no-train-head", "--weights", "2.5", "--trackers", "tensorboard"]
    code, out, _ = cli(*words, "--aux", "d1,d2", "--print-config")
    assert code == 0
    again = load_config(file(out), {})
    assert (again.lr, again.train_head, again.stores[0].weight, again.aux) == (3e-4, False, 2.5, ("d1", "d2"))
    assert (again.serve, again.trackers) == (("vllm@0.32.0", "sglang@0.5.23"), ("tensorboard",))
    code, out2, _ = cli("train", "--config", tmp_path / "run.yaml", "--print-config")
    assert (code, out2) == (0, out)


@pytest.mark.parametrize(("word", "value"), [("null", None), ("none", None), ("0.5", 0.5)])
def test_no_clipping_by_a_flag(cli, file, word, value):
    words = ("train", "a", "--target", "t", "--serve", "vllm@0.32.0", "--out", "o")
    code, out, _ = cli(*words, "--clip", word, "--print-config")
    assert code == 0
    assert load_config(file(out), {}).clip == value
    code, _, err = cli(*words, "--clip", "much", "--print-config")
    assert code == 2
    assert "where     --clip" in err


def test_each_wrong_option_has_a_fix_of_its_own(tmp_path, cli):
    words = ("train", tmp_path, "--target", "t", "--serve", "vllm@0.32.0", "--out", "o")
    for wrong_words, fix in (
        (("--weights", "1,2"), "give a weight for each store"),
        (("--draft-rope", "xx"), "give it as JSON"),
        (("--config", tmp_path / "none.yaml"), "check the path of --config"),
    ):
        code, _, err = cli(*words, *wrong_words)
        assert code == 2
        assert fix in err


def test_wrong_options_end_the_command_with_2(tmp_path, cli, file):
    path = file("stores: [a]\ntarget: t\nserv: [vllm@0.32.0]\nout: o\nlr: -1\n")
    code, out, err = cli("train", "--config", path)
    assert (code, out) == (2, "")
    assert "serve?" in err
    assert "line 5: lr" in err
    assert "3 errors in the options" in err  # serve is missing, too
    assert cli("train", "--config", tmp_path / "none.yaml")[0] == 2
    assert cli("train", tmp_path, "--weights", "1,2", "--out", "o")[0] == 2
    assert cli("train", tmp_path, "--draft-rope", "{", "--out", "o")[0] == 2


def test_config_and_gate_need_no_torch():
    modules = ("config", "configuration", "gate", "vocabulary", "commands.train", "commands.export_draft")
    code = "import sys, " + ", ".join(f"hsformat_trainer.{m}" for m in modules)
    code += "\nassert not {'torch', 'transformers', 'yaml'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
