"""A running vLLM server: prompts go over HTTP as token ids, states come as files in a folder that both machines see.

The server is one that ``python -m hsformat_extractors.hosted.vllm_serve`` prints the command for, which writes captures
by their keys; or one with vLLM's own connector: then only the number of layers can be compared with what is wanted, not
which ones they are, and files are converted. vLLM 0.32.0: ``entrypoints/openai/completion`` (``kv_transfer_params``,
``return_token_ids``), ``/v1/models`` (``max_model_len``), ``/version``, ``/health``.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from hsformat.maintain.finalnorm import FinalNormWeights
from hsformat.problems import ForeignFileError, HsError, problem
from hsformat.target.checkpoint import TensorInfo, read_header, read_integers, read_tensor
from hsformat_extractors.hosted.beat import Beat
from hsformat_extractors.hosted.final_norm import after, final_norm_facts, load_weights
from hsformat_extractors.hosted.options import request_seconds
from hsformat_extractors.hosted.servers import (
    Leftovers,
    authorization,
    check_folder,
    check_served_model,
    how_to_authorize,
    require_health,
)
from hsformat_extractors.hosted.vllm_driver import sampling_arguments
from hsformat_extractors.hosted.vllm_setup import DEVICE, EXTRA, FAILED, Slots, not_written, wanted_slots
from hsformat_extractors.hosted.wire import TOKENS, Answer, Ask, Fault, Launch

__all__ = ["VllmServerDriver"]

CONCURRENCY = 64
_ASK_S = 10.0
"""Seconds after which a server whose file is waited for is asked whether it lives, and again."""
_LOOK = 0.005
"""Seconds between two looks for a file."""
_HEALTH = 10.0
"""Seconds in which a server that lives says so."""
_NAMES = f"*hs{8 * '[0-9a-f]'}-*.safetensors*"
"""Of the files of our requests: the server makes a file's name of the request's id (``hosted.flow``)."""
_START = "start it as python -m hsformat_extractors.hosted.vllm_serve prints, and wait until /health answers"
_TRIAL_S = 60.0
"""Seconds for three tokens and their file, when nothing else is known to be wrong."""
_BEAT_S = 1.0
_OLD_S = 3600.0
"""A file is whole when it is there, and taken at once."""
_FOLDER_S = 30.0
"""Seconds in which a folder that the server has made is seen here."""
_STOCK = "hidden_states"
"""Key of the states in a file of vLLM's own connector, [T, slots, H]."""


@dataclass(frozen=True, kw_only=True)
class _Server:
    """Where the server is, and for how long it is waited for."""

    url: str
    headers: Mapping[str, str]
    timeout: float


@dataclass
class _Heard:
    """When the server last answered any request of many."""

    at: float = 0.0


class _Late(Fault):
    """The server said nothing to a request for as long as it is waited for."""


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What requests need: a launch, and what was found out about the server."""

    launch: Launch
    server: _Server
    model: str
    storage: Path | None
    slots: Slots
    norm: FinalNormWeights | None
    leftovers: Leftovers
    heard: _Heard = field(default_factory=lambda: _Heard())


class VllmServerDriver:
    """Sends requests to a vLLM server. See :class:`hsformat_extractors.hosted.wire.Driver`.

    Options: ``server``, its URL; ``storage``, the folder in which its files are found here (default: the one that the
    server names); ``concurrency``; ``timeout`` in seconds, of one request; ``api_key``, the name of the environment
    variable that holds it.
    """

    def __init__(self) -> None:
        self._session: _Session | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.beat = Beat()

    def start(self, launch: Launch) -> Mapping[str, Any]:
        """Reach the server; ask for its version, its model and the longest sequence that it takes.

        Raises
        ------
        HsError
            HS410: the server cannot be reached or is none of vLLM, serves another target, or does not capture a depth
            of this architecture; the folder of its files, or the variable of its key, is not there.
        """
        self.stop()
        options = launch.options
        server = _Server(
            url=options["server"].rstrip("/").removesuffix("/v1"),
            headers={"Content-Type": "application/json", **authorization(options)},
            timeout=request_seconds(options, max_new_tokens=launch.max_new_tokens),
        )
        storage = Path(options["storage"]) if "storage" in options else None
        if storage is not None:
            check_folder(storage, url=server.url, option="storage")
        version, card = _ask_server(server)
        check_served_model(card.get("root"), launch.model, url=server.url)
        slots = wanted_slots(
            launch.captures,
            version=version,
            architecture=launch.architecture,
            num_layers=launch.num_layers,
            profile=launch.options.get("engine_profile"),
        )
        norm = load_weights(launch.model, final_norm_facts(launch.model)) if slots.normed else None
        self._session = _Session(
            launch=launch, server=server, model=str(card["id"]), storage=storage, slots=slots, norm=norm,
            leftovers=Leftovers(_NAMES, age=max(_OLD_S, 2 * server.timeout)),
        )  # fmt: skip
        try:
            _try(self._session)
        except BaseException:  # raised again: nothing of the start stays
            self.stop()
            raise
        self._pool = ThreadPoolExecutor(int(options.get("concurrency", CONCURRENCY)), thread_name_prefix="vllm-server")
        longest = int(card["max_model_len"])
        return {
            "versions": {"vllm": version},
            "device": f"server {server.url}",
            "engine": {"model": card["id"], "root": card.get("root"), "layer_ids": list(slots.ids)},
            # A prompt is run with one more token, which is thrown away; of an answer the last token is never run.
            "max_tokens": longest if launch.max_new_tokens else longest - 1,
        }

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        """Send all, ``concurrency`` at a time; yield each as it comes.

        Raises
        ------
        HsError
            HS410: it does not answer any more, not even an engine that hangs behind a server that lives; or it writes
            other captures than are wanted. What came before was yielded.
        """
        if self._session is None or self._pool is None:
            raise RuntimeError("start() comes first")
        futures: list[Future[Answer | Fault]] = [self._pool.submit(_one_of_many, self._session, ask) for ask in asks]
        lost: HsError | None = None
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_BEAT_S, return_when=FIRST_COMPLETED)
                self.beat()  # each has a limit of its own
                for future in done:
                    try:
                        yield future.result()
                    except HsError as e:
                        lost = lost or e
                        for other in futures:
                            other.cancel()
                    except CancelledError:
                        continue
        finally:
            for future in futures:
                future.cancel()
        if lost is not None:
            raise lost

    def stop(self) -> None:
        """Let go of the server, which goes on running."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._session is not None:
            self._session.leftovers.close()
        self._pool = self._session = None


def _ask_server(server: _Server) -> tuple[str, dict[str, Any]]:
    """Return the server's version and what it says of its model.

    Raises
    ------
    HsError
        HS410: it cannot be reached, or answers as no server of vLLM does.
    """
    try:
        version = str(_call(server, "/version", timeout=_HEALTH)["version"])
        (card, *_) = _call(server, "/v1/models", timeout=_HEALTH)["data"]
        return version, {**card, "id": str(card["id"]), "max_model_len": int(card["max_model_len"])}
    except (OSError, KeyError, ValueError, TypeError) as e:
        raise HsError(
            problem("HS410", where=f"option server: {server.url}", got=f"{type(e).__name__}: {e}",
                    expected="a vLLM server",
                    fix=how_to_authorize(e) or _START)
        ) from e  # fmt: skip


def _try(session: _Session) -> None:
    """Run three tokens and see their states arrive here, before hours of requests whose files nobody sees.

    Greedily: a server without an accelerator dies when it draws (0.32.0).

    Raises
    ------
    HsError
        HS410: they do not, or are other captures than are wanted; answers are to be drawn, and the server has no
        accelerator.
    """
    prompt = tuple(t % session.launch.vocab_size for t in (1, 2, 3))
    ask = Ask(request=f"hs{secrets.token_hex(4)}-trial", prompt=prompt, max_new_tokens=1)
    limited = replace(
        session,
        server=replace(session.server, timeout=min(_TRIAL_S, session.server.timeout)),
        launch=replace(session.launch, sampling={}),
    )
    found = _one(limited, ask)
    if isinstance(found, Fault):
        folder = "the folder that it names" if session.storage is None else f"{session.storage}"
        raise HsError(
            problem("HS410", where=f"server {session.server.url}", got=f"states of a short request: {found.message}",
                    expected=f"their file in {folder}, within {limited.server.timeout:g} s",
                    fix="give --option storage=FOLDER, the server's folder as it is named here; or start the server as "
                    "python -m hsformat_extractors.hosted.vllm_serve prints")
        )  # fmt: skip
    file = Path(session.launch.staging) / found.file
    device = _device(file)
    file.unlink()
    if device == "cpu" and session.launch.sampling:
        raise HsError(
            problem("HS410", where="generation: sampled", got=f"server {session.server.url}: vLLM on a CPU",
                    expected="an accelerator: on a CPU it draws wrongly, or dies of it",
                    fix="generate greedily, or use another engine on a CPU")
        )  # fmt: skip


def _device(file: Path) -> str | None:
    """Return the kind of device that our connector says in a file; None: vLLM's own connector, which does not."""
    with safe_open(file, framework="numpy") as opened:
        about = json.loads((opened.metadata() or {}).get(EXTRA, "{}"))
    return about.get(DEVICE) if isinstance(about, dict) else None


def _one_of_many(session: _Session, ask: Ask) -> Answer | Fault:
    """Run one request, in a thread.

    Raises
    ------
    HsError
        HS410: it was not answered, nor was any other for as long; what the server wrote is no state of this target.
    """
    began = time.monotonic()
    found = _one(session, ask)
    if not isinstance(found, _Late):
        session.heard.at = time.monotonic()
    elif session.heard.at < began:
        raise HsError(
            problem("HS410", where=f"server {session.server.url}",
                    got=f"no answer to any request for {session.server.timeout:g} s: {found.message}",
                    expected="a server that answers",
                    fix="look at the server's log and start it again, or give --option timeout if it needs longer; "
                    "what is committed stays, and the same command goes on from there")
        )  # fmt: skip
    return found


def _one(session: _Session, ask: Ask) -> Answer | Fault:
    launch, server = session.launch, session.server
    body = {
        "model": session.model,
        "prompt": list(ask.prompt),
        "request_id": ask.request,
        "return_token_ids": True,
        "kv_transfer_params": {"include_output_tokens": launch.max_new_tokens > 0},
        **sampling_arguments(launch, ask),
    }
    try:
        told = _call(server, "/v1/completions", body, timeout=server.timeout)
        choice = (told["choices"] or [None])[0]
        prompt, new = (tuple(int(i) for i in choice[key]) for key in ("prompt_token_ids", "token_ids"))
        path = Path((told["kv_transfer_params"] or {})["hidden_states_path"])
    except urllib.error.HTTPError as e:
        message = f"HTTP {e.code}: {e.read(2000).decode('utf-8', 'replace')}"
        if e.code >= 500:
            _require_health(server, message)
        return Fault(request=ask.request, message=message, again=e.code >= 500)
    except KeyError as e:
        message = f"the server's answer lacks {e}"
        if e.args[0] in ("kv_transfer_params", "hidden_states_path"):
            message += ": it was not started with a connector for hidden states"
        return Fault(request=ask.request, message=message)
    except TypeError as e:
        return Fault(request=ask.request, message=f"no answer as vLLM gives them: {e}", again=True)
    except (OSError, ValueError) as e:  # refused, reset, timed out, no JSON
        _require_health(server, f"{type(e).__name__}: {e}")
        late = isinstance(e, TimeoutError) or isinstance(getattr(e, "reason", None), TimeoutError)
        return (_Late if late else Fault)(request=ask.request, message=f"{type(e).__name__}: {e}", again=True)
    answers = launch.max_new_tokens > 0
    answer = Answer(
        request=ask.request,
        tokens=(*prompt, *new) if answers else prompt,
        file=f"{ask.request}.safetensors",
        next_token=new[0] if new and not answers else None,
    )
    return _collect(session, answer, path)


def _collect(session: _Session, answer: Answer, told: Path) -> Answer | Fault:
    """Wait for a file of the server, which has told its path; take it into the staging folder in the wire's form."""
    path = told if session.storage is None else session.storage / told.name
    told = told.parent
    launch, seconds, request = session.launch, session.server.timeout, answer.request
    session.leftovers.seen(path.parent, request)
    began = time.monotonic()
    deadline, ask = began + seconds, began + _ASK_S
    failed, lock = path.with_name(path.name + FAILED), path.with_name(path.name + ".lock")
    while not path.exists() or not _free(lock):
        if failed.exists():
            return not_written(request, failed)
        if time.monotonic() - began > min(_FOLDER_S, seconds):
            check_folder(path.parent, url=session.server.url, option="storage")
        if time.monotonic() > ask:  # a server that died writes no more
            _require_health(session.server, f"{path.name} did not come")
            ask = time.monotonic() + _ASK_S
        if time.monotonic() > deadline:
            message = f"{path.name}, written to {told} there, did not appear in {path.parent} in {seconds:.0f} s"
            _require_health(session.server, message)
            return Fault(request=request, message=message, again=True)
        time.sleep(_LOOK)
    wanted = Path(launch.staging) / answer.file
    try:
        infos = {info.name: info for info in read_header(path)}
        there, needed = set(infos), {*launch.captures, TOKENS}
        if {_STOCK, TOKENS} <= there:
            _convert(infos, wanted, session)
        elif there == needed:
            _move(path, wanted)
        elif there > needed:
            _write({key: read_tensor(infos[key]) for key in launch.captures}, infos[TOKENS], wanted)
        else:
            raise _other_captures(session, ", ".join(sorted(there - {TOKENS})))
    except ForeignFileError as e:  # broken, or gone
        return Fault(request=request, message=f"a file of the server: {e.problems[0].got}", again=True)
    finally:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    return answer


def _convert(infos: Mapping[str, TensorInfo], wanted: Path, session: _Session) -> None:
    """Write the file of vLLM's own connector in the wire's form."""
    states_TSH, slots, norm = read_tensor(infos[_STOCK]), session.slots, session.norm
    if states_TSH.ndim != 3 or states_TSH.shape[1] != len(slots.ids):
        raise _other_captures(session, f"{list(states_TSH.shape)[1:]} numbers a token, of its own connector")
    arrays = {}
    for name, (slot, normed) in slots.keys.items():
        h_TH = np.ascontiguousarray(states_TSH[:, slot])
        arrays[name] = after(norm, h_TH) if normed and norm is not None else h_TH
    _write(arrays, infos[TOKENS], wanted)


def _write(arrays: Mapping[str, Any], tokens: TensorInfo, wanted: Path) -> None:
    ids = read_integers(tokens)
    if ids is None:
        got, expected = f"{TOKENS} of dtype {tokens.dtype}", "integers"
        raise ForeignFileError(problem("HS602", where=str(tokens.file), got=got, expected=expected))
    part = wanted.with_suffix(".part")
    save_file({**arrays, TOKENS: ids.astype(np.int64)}, part)
    os.replace(part, wanted)


def _other_captures(session: _Session, got: str) -> HsError:
    captures = ", ".join(session.launch.captures)
    return HsError(
        problem("HS410", where=f"server {session.server.url}: captures", got=got,
                expected=f"{captures} (layer ids {list(session.slots.ids)})",
                fix=f"start it with --captures {captures.replace(', ', ',')}, as python -m "
                "hsformat_extractors.hosted.vllm_serve prints, or extract what it writes")
    )  # fmt: skip


def _call(server: _Server, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers=dict(server.headers))
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            told = json.loads(response.read())
    except HTTPException as e:  # no HTTP, no port, or an answer that breaks off
        raise ConnectionError(f"{type(e).__name__}: {e}") from e
    if not isinstance(told, dict):
        raise ValueError(f"{path} answered {type(told).__name__}, not a JSON object")
    return told


def _require_health(server: _Server, said: str) -> None:
    require_health(server.url, said, seconds=_HEALTH, headers=server.headers)


def _free(lock: Path) -> bool:
    """Return whether nobody writes under the lock of vLLM's own connector; our connector has none."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _move(path: Path, wanted: Path) -> None:
    """Rename a file; between two file systems, copy it under another name first."""
    try:
        os.replace(path, wanted)
    except OSError:
        part = wanted.with_suffix(".part")
        shutil.copyfile(path, part)
        os.replace(part, wanted)
