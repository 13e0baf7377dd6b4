"""The driver of a vLLM server against a server of our own that misbehaves on request."""

import errno
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hsformat.problems import HsError
from hsformat.target.checkpoint import read_header, read_integers, read_tensor
from hsformat_extractors.hosted.final_norm import final_norm_facts, load_weights
from hsformat_extractors.hosted.vllm_server import VllmServerDriver
from hsformat_extractors.hosted.vllm_setup import EXTRA, FAILED, not_written
from hsformat_extractors.hosted.wire import TOKENS, Answer, Ask, Fault, Launch
from tests.unit.test_vllm_hosted import HIDDEN, LAST, TINY, launch


class FakeServer(ThreadingHTTPServer):
    """Answers as vLLM does; the first token of a prompt says what goes wrong."""

    daemon_threads = True

    def __init__(self, storage: Path, *, stock: bool = False, version: str = "0.32.0", told: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.storage, self.stock, self.version, self.told = storage, stock, version, told
        self.root, self.healthy = str(TINY), True
        self.device: str | None = None
        self.key: str | None = None
        self.seen: list[dict[str, Any]] = []
        self.busy = self.most = 0
        self.counting = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def die(self) -> None:
        self.shutdown()
        self.server_close()


REFUSED, FAILS, NO_FILE, NOT_WRITTEN, DIES, NO_CONNECTOR, NO_CHOICES, SILENT = range(90, 98)


def states(ids: list[int]) -> np.ndarray:
    """Return [T, 2, H] that follow from the ids."""
    return (np.array(ids)[:, None, None] + np.arange(2 * HIDDEN).reshape(2, HIDDEN) / 1000).astype(np.float32)


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def tell(self, data: Any, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.tell({"error": "Unauthorized"}, 401)
            return
        models = {"data": [{"id": "tiny", "root": self.server.root, "max_model_len": 128}]}
        if self.path == "/health" and not self.server.healthy:
            self.tell({"error": "EngineDeadError"}, 503)
            return
        self.tell({"/version": {"version": self.server.version}, "/v1/models": models}.get(self.path, {}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:
            self.server.seen.append({**asked, "authorization": self.headers.get("Authorization")})
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
        try:
            self.answer(asked)
        finally:
            with self.server.counting:
                self.server.busy -= 1

    def answer(self, asked: dict[str, Any]) -> None:
        prompt, new = asked["prompt"], list(range(50, 50 + asked["max_tokens"]))
        time.sleep(0.01)
        wrong = prompt[0]
        if wrong == SILENT:
            time.sleep(3)
            return
        if wrong == DIES:
            self.server.socket.close()
            threading.Thread(target=self.server.die).start()
            self.connection.close()
            return
        if wrong in (REFUSED, FAILS):
            self.tell({"error": {"message": "too long"}}, 400 if wrong == REFUSED else 500)
            return
        choice = {"prompt_token_ids": prompt, "token_ids": new}
        if wrong == NO_CHOICES:
            self.tell({"choices": None})
            return
        path = self.server.storage / f"cmpl-{asked['request_id']}.safetensors"
        if wrong == NO_CONNECTOR:
            self.tell({"choices": [choice], "kv_transfer_params": None})
            return
        if wrong == NOT_WRITTEN:
            path.with_name(path.name + FAILED).write_text("OSError: full")
        elif wrong != NO_FILE:
            threading.Thread(target=self.write, args=(asked, prompt, new, path)).start()
        told = path if self.server.told is None else Path(self.server.told) / path.name
        self.tell({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(told)}})

    def write(self, asked: dict[str, Any], prompt: list[int], new: list[int], path: Path) -> None:
        ran = [*prompt, *new[:-1]] if asked["kv_transfer_params"]["include_output_tokens"] else prompt
        h = states(ran)
        ids = np.array(ran, np.int64)
        if self.server.stock:
            lock = path.with_name(path.name + ".lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.write_bytes(b"half")
            time.sleep(0.05)
            save_file({"hidden_states": h, TOKENS: ids}, path)
            lock.close()
        else:
            time.sleep(0.02)
            part = path.with_suffix(".part")
            about = None if self.server.device is None else {EXTRA: json.dumps({"device": self.server.device})}
            save_file({"d1": h[:, 0].copy(), LAST: h[:, 1].copy(), TOKENS: ids}, part, metadata=about)
            part.rename(path)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


def started(server: FakeServer, given: Launch) -> VllmServerDriver:
    driver = VllmServerDriver()
    driver.start(given)
    return driver


def arrays(given: Launch, answer: Answer | Fault) -> dict[str, np.ndarray]:
    assert isinstance(answer, Answer), answer
    out = {}
    for info in read_header(Path(given.staging) / answer.file):
        integers = read_integers(info)
        out[info.name] = read_tensor(info) if integers is None else integers
    return out


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("new", [0, 4])
def test_answers_are_matched_by_request_and_files_are_taken_from_the_server(tmp_path, storage, stock, new):
    server = FakeServer(storage, stock=stock, told="/elsewhere")
    options = {"server": server.url, "storage": str(storage), "concurrency": "3"}
    given = launch(tmp_path, max_new_tokens=new, stop_token_ids=(2,), options=options)
    driver = started(server, given)
    asks = [Ask(request=f"r-{i}", prompt=tuple(range(3 + i, 10 + 2 * i))) for i in range(12)]
    out = {a.request: a for a in driver.run(asks)}
    driver.stop()
    driver.stop()
    server.die()
    assert sorted(out) == sorted(a.request for a in asks)
    for ask in asks:
        answer = out[ask.request]
        assert answer.tokens == (*ask.prompt, *range(50, 50 + new))
        assert answer.next_token == (None if new else 50)
        found = arrays(given, answer)
        ran = list(answer.tokens[: len(answer.tokens) - (new > 0)])
        assert set(found) == {"d1", LAST, TOKENS}
        assert found[TOKENS].tolist() == ran
        np.testing.assert_array_equal(found["d1"], states(ran)[:, 0])
        np.testing.assert_array_equal(found[LAST], states(ran)[:, 1])
    assert list(storage.iterdir()) == []
    assert server.most <= 3


def test_a_stock_server_gives_the_state_after_the_norm_as_well(tmp_path, storage):
    server = FakeServer(storage, stock=True)
    given = launch(tmp_path, "d1", f"{LAST}n", options={"server": server.url})
    (answer,) = started(server, given).run([Ask(request="r", prompt=(3, 4, 5))])
    norm = load_weights(str(TINY), final_norm_facts(str(TINY)))
    np.testing.assert_array_equal(arrays(given, answer)[f"{LAST}n"], norm.apply(states([3, 4, 5])[:, 1]))


@pytest.mark.parametrize(
    ("captures", "stock", "said"),
    [(("d1",), True, "[2, "), (("d0", "d1", LAST), True, "[2, "), (("d0", "d1", LAST), False, "d1, ")],
)
def test_a_server_that_captures_other_layers_is_found_out(tmp_path, storage, captures, stock, said):
    server = FakeServer(storage, stock=stock)
    with pytest.raises(HsError) as e:
        started(server, launch(tmp_path, *captures, options={"server": server.url}))
    (p,) = e.value.problems
    assert (p.code, p.where) == ("HS410", f"server {server.url}: captures")
    assert p.got.startswith(said)
    assert list(storage.iterdir()) == []


def test_of_a_server_that_writes_more_what_is_wanted_is_taken(tmp_path, storage):
    given = launch(tmp_path, "d1", options={"server": FakeServer(storage).url})
    driver = VllmServerDriver()
    driver.start(given)
    (answer,) = driver.run([Ask(request="r", prompt=(3, 4))])
    found = arrays(given, answer)
    assert set(found) == {"d1", TOKENS}
    np.testing.assert_array_equal(found["d1"], states([3, 4])[:, 0])
    assert list(storage.iterdir()) == []


def test_a_server_of_another_model_is_refused(tmp_path, storage):
    """Of the same sizes, so that nothing else tells: its states were stored under the contract of this target."""
    server = FakeServer(storage)
    for name, again in (("same", False), ("other", True)):
        server.root = str(shutil.copytree(TINY, tmp_path / name))
        if again:
            file = tmp_path / name / "model.safetensors"
            tensors = load_file(file)
            tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
            save_file(tensors, file, metadata={"format": "pt"})
            with pytest.raises(HsError) as e:
                started(server, launch(tmp_path, options={"server": server.url}))
            assert [(p.code, p.where) for p in e.value.problems] == [("HS410", f"server {server.url}: model")]
        else:
            started(server, launch(tmp_path, options={"server": server.url})).stop()
    server.root = "org/name"  # of a hub: not compared
    started(server, launch(tmp_path, options={"server": server.url})).stop()


def test_a_server_whose_engine_is_dead_ends_the_run(tmp_path, storage):
    """Its HTTP side goes on answering 500: every record was given up for its own sake."""
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url, "concurrency": "1"}))
    server.healthy = False
    with pytest.raises(HsError, match="HTTP 500"):
        list(driver.run([Ask(request=f"r{i}", prompt=(FAILS,)) for i in range(9)]))
    assert len(server.seen) < 9


@pytest.mark.parametrize("named", ["here", "there"])
def test_a_folder_that_is_not_there_is_told(tmp_path, storage, named):
    """It was waited for, eight minutes a window."""
    server = FakeServer(storage, told=None if named == "here" else str(tmp_path / "none"))
    options = {"server": server.url, "timeout": "1"} | ({"storage": str(tmp_path / "none")} if named == "here" else {})
    with pytest.raises(HsError) as e:
        list(started(server, launch(tmp_path, options=options)).run([Ask(request="r", prompt=(3,))]))
    (p,) = e.value.problems
    assert (p.code, p.where) == ("HS410", f"server {server.url}: folder of its states")


def test_a_folder_to_which_no_file_comes_is_told_after_one_request(tmp_path, storage):
    """It is there, and is not the server's: at the default, hours of requests would have waited for files."""
    (tmp_path / "other").mkdir()
    server = FakeServer(storage)
    with pytest.raises(HsError) as e:
        started(
            server, launch(tmp_path, options={"server": server.url, "storage": str(tmp_path / "other"), "timeout": "1"})
        )
    (p,) = e.value.problems
    assert (p.code, "storage=" in p.fix, len(server.seen)) == ("HS410", True, 1)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_server_that_wants_a_key_says_so(tmp_path, storage, monkeypatch, key):
    server = FakeServer(storage)
    server.key = "right"
    monkeypatch.setenv("OUR_KEY", str(key))
    with pytest.raises(HsError) as e:
        started(server, launch(tmp_path, options={"server": server.url} | ({"api_key": "OUR_KEY"} if key else {})))
    (p,) = e.value.problems
    assert (p.code, "api_key" in p.fix) == ("HS410", True)


def test_what_a_session_gave_up_goes_with_it(tmp_path, storage):
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url}))
    assert all(isinstance(a, Answer) for a in driver.run([Ask(request="hs0123abcd-1", prompt=(3, 4))]))
    (storage / "cmpl-hs0123abcd-2-0.safetensors").touch()  # came too late
    (storage / "cmpl-hs4567abcd-2-0.safetensors").touch()  # another session's
    driver.stop()
    assert [p.name for p in storage.iterdir()] == ["cmpl-hs4567abcd-2-0.safetensors"]


def test_a_broken_file_is_asked_for_again(tmp_path, storage):
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url}))
    (storage / "cmpl-r.safetensors").write_bytes(b"ab")
    (fault,) = driver.run([Ask(request="r", prompt=(NO_FILE,))])
    assert isinstance(fault, Fault)
    assert fault.again
    assert list(storage.iterdir()) == []


def test_addresses_and_keys_that_are_none_are_told(tmp_path, storage, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    silent = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: silent.accept()[0].close(), daemon=True).start()
    for options in (
        {"server": "http://127.0.0.1:abc"},
        {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"},
        {"server": FakeServer(storage).url, "api_key": "NO_SUCH_KEY"},
    ):
        with pytest.raises(HsError) as e:
            VllmServerDriver().start(launch(tmp_path, options=options))
        assert [p.code for p in e.value.problems] == ["HS410"]
    silent.close()


def test_a_full_disk_ends_the_run_instead_of_each_request(tmp_path):
    failed = tmp_path / f"x{FAILED}"
    failed.write_text("SafetensorError: I/O error: No space left on device (os error 28)")
    with pytest.raises(OSError, match="No space") as e:
        not_written("r", failed)
    assert e.value.errno == errno.ENOSPC
    assert not failed.exists()
    failed.touch()  # there was no space to say why
    with pytest.raises(OSError, match="No space"):
        not_written("r", failed)


@pytest.mark.parametrize(
    ("first", "again", "said"),
    [
        (REFUSED, False, "HTTP 400"),
        (FAILS, True, "HTTP 500"),
        (NO_FILE, True, "did not appear"),
        (NOT_WRITTEN, True, "OSError: full"),
        (NO_CONNECTOR, False, "connector"),
        (NO_CHOICES, True, "no answer as vLLM gives them"),
    ],
)
def test_one_request_fails_and_the_others_do_not(tmp_path, storage, first, again, said):
    server = FakeServer(storage)
    given = launch(tmp_path, options={"server": server.url, "timeout": "1"})
    driver = started(server, given)
    out = {a.request: a for a in driver.run([Ask(request="bad", prompt=(first,)), Ask(request="good", prompt=(3, 4))])}
    fault = out["bad"]
    assert isinstance(fault, Fault)
    assert (fault.again, said in fault.message) == (again, True), fault.message
    assert isinstance(out["good"], Answer)


def test_a_server_that_died_before_it_wrote_is_not_waited_for(tmp_path, storage, monkeypatch):
    """It had answered: the run went on for the whole time-out of a file, eight minutes at the default."""
    monkeypatch.setattr("hsformat_extractors.hosted.vllm_server._ASK_S", 0.2)
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url}))
    threading.Timer(0.5, server.die).start()
    with pytest.raises(HsError, match="does not answer any more"):
        list(driver.run([Ask(request="r", prompt=(NO_FILE,))]))


def test_an_engine_that_hangs_behind_a_server_that_lives_ends_the_run(tmp_path, storage):
    """``/health`` answers on: every record was given up for its own sake, at two time-outs a record."""
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url, "timeout": "1", "concurrency": "2"}))
    done: list[Answer | Fault] = []
    with pytest.raises(HsError, match="no answer to any request") as e:
        done.extend(
            driver.run([Ask(request="a", prompt=(3,)), *(Ask(request=f"b{i}", prompt=(SILENT,)) for i in range(9))])
        )
    assert [p.code for p in e.value.problems] == ["HS410"]
    assert [a.request for a in done][:1] == ["a"]
    assert len(server.seen) < 9


def test_one_request_that_is_not_answered_is_given_up_where_others_are(tmp_path, storage):
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url, "timeout": "1", "concurrency": "2"}))
    asks = [Ask(request="bad", prompt=(SILENT,)), *(Ask(request=f"r{i}", prompt=(3, i)) for i in range(60))]
    out = {a.request: a for a in driver.run(asks)}
    assert [r for r, a in out.items() if isinstance(a, Fault)] == ["bad"]
    assert len(out) == 61


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False), (None, False)])
def test_drawn_answers_of_a_server_on_a_cpu_are_refused(tmp_path, storage, device, refused):
    """It dies of the first such request, the trial's as well."""
    server = FakeServer(storage)
    server.device = device
    drawn = {"sampling": {"temperature": 0.7, "seed": 1}, "max_new_tokens": 4, "options": {"server": server.url}}
    if refused:
        with pytest.raises(HsError, match="on a CPU"):
            started(server, launch(tmp_path, **drawn))
    else:
        started(server, launch(tmp_path, **drawn)).stop()
    assert [asked["temperature"] for asked in server.seen] == [0.0]
    greedy = {**drawn, "sampling": {}}
    started(server, launch(tmp_path, **greedy)).stop()


def test_files_that_killed_clients_left_are_removed_once_they_are_old(tmp_path, storage):
    """A server writes on for a client that is gone; nobody else knows of these files."""
    server = FakeServer(storage)
    old, young, anothers = (storage / n for n in (
        "cmpl-hs0123abcd-7-0.safetensors", "cmpl-hs0123abcd-8-0.safetensors", "cmpl-5f1e-0.safetensors",
    ))  # fmt: skip
    for path in (old, young, anothers):
        path.write_bytes(b"states")
    for path in (old, anothers):
        os.utime(path, (time.time() - 7200,) * 2)
    driver = started(server, launch(tmp_path, options={"server": server.url}))
    assert all(isinstance(a, Answer) for a in driver.run([Ask(request=f"r-{i}", prompt=(3, i)) for i in range(3)]))
    assert sorted(storage.iterdir()) == sorted([young, anothers])


def test_a_server_that_dies_ends_the_run_with_its_name(tmp_path, storage):
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": server.url, "timeout": "5", "concurrency": "1"}))
    asks = [Ask(request="a", prompt=(3,)), *(Ask(request=f"b{i}", prompt=(DIES,)) for i in range(3))]
    done: list[Answer | Fault] = []
    with pytest.raises(HsError, match="does not answer any more"):
        done.extend(driver.run(asks))
    assert [a.request for a in done] == ["a"]
    driver.stop()


@pytest.mark.parametrize("version", ["0.19.0", None])
def test_a_server_of_another_version_or_none_is_refused(tmp_path, storage, version):
    server = FakeServer(storage, version=version or "0.32.0")
    url = server.url
    if version is None:
        server.die()
    with pytest.raises(HsError) as e:
        VllmServerDriver().start(launch(tmp_path, options={"server": url}))
    assert [p.code for p in e.value.problems] == ["HS410"]


def test_the_key_comes_from_the_environment(tmp_path, storage, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "abc")
    server = FakeServer(storage)
    driver = started(server, launch(tmp_path, options={"server": f"{server.url}/v1/", "api_key": "OUR_KEY"}))
    list(driver.run([Ask(request="r", prompt=(3,))]))
    assert server.seen[0]["authorization"] == "Bearer abc"
