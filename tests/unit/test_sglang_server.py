"""The driver of a running SGLang server, on a server that answers as SGLang 0.5.23 does and whose hook writes files."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hsformat.problems import HsError
from hsformat_extractors.hosted.sglang_args import engine_arguments, plan_captures
from hsformat_extractors.hosted.sglang_server import SglangServerDriver
from hsformat_extractors.hosted.wire import Answer, Ask, Fault, Launch

pytestmark = pytest.mark.needs("torch")

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
KEYS = ("d2", "d15", "d27", "d30")
LAUNCH = Launch(
    model="/m", architecture="LlamaForCausalLM", num_layers=30, hidden_size=4, vocab_size=50, dtype="bfloat16",
    captures=KEYS, staging="/s", batch_tokens=1000,
)  # fmt: skip


class Server:
    """``info``: what it tells of itself; ``writes``: where its hook writes, None: nowhere."""

    def __init__(self, hook_folder: Path) -> None:
        arguments = engine_arguments(LAUNCH, plan_captures("0.5.23", LAUNCH), staging=str(hook_folder), cpu=False)
        off = {"backend": "disabled"}
        self.info: dict[str, Any] = {
            **arguments, "version": "0.5.23", "speculative_algorithm": None, "pp_size": 1, "device": "cuda",
            "max_req_input_len": 8185, "cuda_graph_config": {"prefill": off, "decode": off},
        }  # fmt: skip
        self.writes: Path | None = hook_folder
        self.healthy = True
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids = body["input_ids"]
        if len(ids) == 7:
            return 503, {"error": {"message": "The request queue is full"}}
        if len(ids) > 8:
            return 400, {"error": {"message": "Input length exceeds the maximum"}}
        new = list(range(20, 20 + body["sampling_params"]["max_new_tokens"]))
        if self.writes is not None:
            ran = ids + new[:-1]
            rows = {k: torch.zeros(len(ran), 4) for k in KEYS}
            name = f"{body['rid']}.aa.000000001.0.{len(ran)}.part"
            save_file({**rows, "token_ids": torch.tensor(ran)}, self.writes / name)
        return 200, {"output_ids": new, "meta_info": {"finish_reason": {"type": "length"}}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(503 if self.path == "/health" and not server.healthy else 200, server.info)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._reply(*server.generate(body))

            def _reply(self, code: int, data: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(data).encode())

            def log_message(self, *_args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    (tmp_path / "hook").mkdir()
    (tmp_path / "own").mkdir()
    made = Server(tmp_path / "hook")
    yield made
    made.http.shutdown()
    made.http.server_close()


def start(server: Server, tmp_path: Path, **changes: Any) -> tuple[SglangServerDriver, Any]:
    driver = SglangServerDriver()
    options = {"server": f"{server.url}/", "timeout": "5"}
    launch = replace(LAUNCH, staging=str(tmp_path / "own"), options=options, **changes)
    return driver, driver.start(launch)


def test_states_come_from_the_folder_of_its_hook(server, tmp_path):
    driver, told = start(server, tmp_path)
    assert told["versions"]["sglang"] == "0.5.23"
    assert told["max_tokens"] == 8184
    asks = [Ask(request=f"r-{i}", prompt=tuple(range(3, 4 + i))) for i in range(6)]
    (tmp_path / "hook" / "hsffffffff-1.aa.000000001.0.2.part").touch()  # of another client
    bad = [Ask(request="long", prompt=(1,) * 9), Ask(request="busy", prompt=(1,) * 7)]
    found = {f.request: f for f in driver.run([*asks, *bad])}
    long, busy = found.pop("long"), found.pop("busy")
    assert isinstance(long, Fault)
    assert isinstance(busy, Fault)
    assert (long.again, busy.again) == (False, True)
    assert all(isinstance(found[a.request], Answer) and found[a.request].tokens == a.prompt for a in asks)
    assert sorted(p.name for p in (tmp_path / "own").iterdir()) == sorted(f"{a.request}.safetensors" for a in asks)
    driver.stop()
    driver.stop()
    assert [p.name for p in (tmp_path / "hook").iterdir()] == ["hsffffffff-1.aa.000000001.0.2.part"]


def test_files_that_killed_clients_left_are_removed_once_they_are_old(server, tmp_path):
    hook, young = tmp_path / "hook", "hseeeeeeee-2.aa.000000003.0.2.part"
    old = ("hseeeeeeee-1.aa.000000001.0.2.part", "hseeeeeeee.aa.000000002.step", "hsformat-notes.txt")
    for name in (*old, young):
        (hook / name).touch()
    for name in old:
        os.utime(hook / name, (time.time() - 86_400,) * 2)
    start(server, tmp_path)[0].stop()
    assert sorted(p.name for p in hook.iterdir()) == [young, "hsformat-notes.txt"]


def test_a_subset_of_its_captures_and_answers(server, tmp_path):
    driver, _ = start(server, tmp_path, captures=("d15", "d30"), max_new_tokens=3, stop_token_ids=(2,))
    (found,) = driver.run([Ask(request="r-0", prompt=(5, 6))])
    assert isinstance(found, Answer)
    assert found.tokens == (5, 6, 20, 21, 22)
    driver.stop()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_hooks": None}, "its hook"),
        ({"forward_hooks": [{"hook_factory": "other:one", "config": {}}]}, "its hook"),
        ({"version": "0.5.22"}, "version"),
        ({"version": "?"}, "version"),
        ({"dtype": "float32"}, "dtype"),
        ({"disable_radix_cache": False}, "disable_radix_cache"),
        ({"pp_size": 2}, "pp_size"),
        ({"speculative_algorithm": "EAGLE3"}, "speculative_algorithm"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "cuda_graph_config"),
        ({"json_model_override_args": '{"rope_theta": 50.0}'}, "json_model_override_args"),
        ({"quantization": "fp8"}, "quantization"),
        ({"load_format": "dummy"}, "load_format"),
        ({"lora_paths": ["/l"]}, "lora_paths"),
    ],
)
def test_a_server_that_cannot_give_states_is_refused(server, tmp_path, changes, words):
    server.info |= changes
    with pytest.raises(HsError, match="HS410") as e:
        start(server, tmp_path)
    assert any(words in p.where for p in e.value.problems)


def test_what_a_server_tells_where_nothing_was_given_is_no_other_model(server, tmp_path):
    server.info |= {
        "json_model_override_args": "{}", "quantization": None, "load_format": "auto", "kv_cache_dtype": "auto",
        "torchao_config": "", "lora_paths": None, "enable_lora": None, "revision": None,
        "model_loader_extra_config": "{}",
    }  # fmt: skip
    start(server, tmp_path)[0].stop()


def test_a_quantised_target_is_served_as_its_folder_says(server, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    server.info |= {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "model_path": str(model)}
    start(server, tmp_path, model=str(model))[0].stop()


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("sglang serve --model /m --forward-hooks [...]", []),
        ("sglang serve --model-path /m --kv-cache-dtype=fp8_e4m3", ["kv_cache_dtype"]),
        ("sglang serve --model-path /m --quant fp8", ["quantization"]),
        ("sglang serve --config file", ["quantization", "kv_cache_dtype"]),
        ("Engine(model_path='/m')", ["quantization", "kv_cache_dtype"]),
    ],
)
def test_what_a_server_was_not_told_is_its_own_choice(server, tmp_path, command, refused):
    server.info |= {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "launch_command": command}
    if not refused:
        server.info["model_config_parser"] = "mistral"
        start(server, tmp_path)[0].stop()
        return
    with pytest.raises(HsError, match="another model than the folder describes") as e:
        start(server, tmp_path)
    assert [p.where for p in e.value.problems] == [f"server {server.url}: {name}" for name in refused]


@pytest.mark.parametrize(
    ("end", "error"), [(".aa.000000001.0.2.part", HsError), (".aa.000000002.step", SafetensorError)]
)
def test_a_run_that_ends_in_an_error_leaves_nothing_in_the_servers_folder(server, tmp_path, end, error):
    driver, _ = start(server, tmp_path)

    def dies(body):
        rid = body["rid"] if end.endswith("part") else driver.parts.run
        (tmp_path / "hook" / f"{rid}{end}").touch()
        server.healthy = False
        return 503, {}

    server.generate = dies
    with pytest.raises(error):
        list(driver.run([Ask(request="r-0", prompt=(1, 2))]))
    assert list((tmp_path / "hook").iterdir()) == []


@pytest.mark.parametrize("seconds", [0.6, None])
def test_files_that_are_seen_later_than_the_answer_are_waited_for(server, tmp_path, seconds):
    """As over NFS, where a folder is remembered for a while."""
    generate, driver = server.generate, start(server, tmp_path)[0]
    driver._late_s = 2.0
    (hidden := tmp_path / "hidden").mkdir()

    def late(body):
        if len(body["input_ids"]) != 3:
            return generate(body)
        folder, server.writes = server.writes, hidden
        found = generate(body)
        server.writes = folder
        (file,) = hidden.iterdir()
        if seconds is not None:
            threading.Timer(seconds, lambda: file.rename(folder / file.name)).start()
        return found

    server.generate = late
    asks = [Ask(request="late", prompt=(3, 4, 5)), *(Ask(request=f"r{i}", prompt=(3, 4)) for i in range(3))]
    found = {f.request: f for f in driver.run(asks[:1])} | {f.request: f for f in driver.run(asks[1:])}
    assert all(isinstance(found[f"r{i}"], Answer) for i in range(3))
    if seconds is not None:
        assert isinstance(found["late"], Answer)
    else:
        assert "0 rows came, not 3" in found["late"].message
        assert found["late"].again


def test_a_server_of_other_captures_or_another_target_is_refused(server, tmp_path):
    with pytest.raises(HsError, match="d29"):
        start(server, tmp_path, captures=("d2", "d29"))
    with pytest.raises(HsError, match="hidden size"):
        start(server, tmp_path, hidden_size=8)


def test_a_hook_that_writes_elsewhere_is_found_before_anything_is_asked(server, tmp_path):
    server.writes = None
    with pytest.raises(HsError, match="states of a short request"):
        start(server, tmp_path)


def test_a_server_that_dies_ends_the_run(server, tmp_path):
    driver, _ = start(server, tmp_path)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(HsError, match="does not answer any more"):
        list(driver.run([Ask(request="r-0", prompt=(5,)), Ask(request="r-1", prompt=(6,))]))
    driver.stop()


def test_a_server_whose_engine_is_dead_ends_the_run(server, tmp_path):
    driver, _ = start(server, tmp_path)
    server.healthy = False
    with pytest.raises(HsError, match="HTTP 503") as e:
        list(driver.run([Ask(request=f"r-{i}", prompt=(1,) * 7) for i in range(3)]))
    assert [p.code for p in e.value.problems] == ["HS410"]
    driver.stop()


def test_a_server_of_another_model_or_with_another_folder_is_refused(server, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((TINY / "config.json").read_text())
    for file in TINY.iterdir():
        if file.name != "config.json":
            (other / file.name).symlink_to(file)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    server.info["model_path"] = str(other)
    with pytest.raises(HsError) as e:
        start(server, tmp_path, model=str(TINY), captures=("d0",))  # which it does not give: of no use to say
    assert [p.where for p in e.value.problems] == [f"server {server.url}: model"]
    server.info["model_path"] = str(TINY)
    (tmp_path / "hook").rmdir()
    with pytest.raises(HsError) as e:
        start(server, tmp_path, model=str(TINY))
    assert [p.where for p in e.value.problems] == [f"server {server.url}: folder of its states"]


def test_no_server(tmp_path):
    driver = SglangServerDriver()
    with pytest.raises(HsError, match="HS410"):
        driver.start(replace(LAUNCH, staging=str(tmp_path), options={"server": "http://127.0.0.1:9"}))
    driver.stop()
