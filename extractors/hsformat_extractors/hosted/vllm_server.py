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
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hsformat.maintain.finalnorm import FinalNormWeights
from hsformat.problems import HsError, problem
from hsformat.target.checkpoint import TensorInfo, read_header, read_integers, read_tensor
from hsformat_extractors.hosted.final_norm import after, final_norm_facts, load_weights
from hsformat_extractors.hosted.vllm_driver import PATIENCE, TIMEOUT, sampling_arguments
from hsformat_extractors.hosted.vllm_setup import FAILED, Slots, not_written, wanted_slots
from hsformat_extractors.hosted.wire import TOKENS, Answer, Ask, Fault, Launch

__all__ = ["ServerDied", "VllmServerDriver"]

CONCURRENCY = 64
_LOOK = 0.005
"""Seconds between two looks for a file."""
_HEALTH = 10.0
"""Seconds in which a server that lives says so."""
_STOCK = "hidden_states"
"""Key of the states in a file of vLLM's own connector, [T, slots, H]."""


class ServerDied(RuntimeError):
    """The server does not answer any more."""


@dataclass(frozen=True, kw_only=True)
class _Server:
    """Where the server is, and for how long it is waited for."""

    url: str
    headers: Mapping[str, str]
    timeout: float


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What requests need: a launch, and what was found out about the server."""

    launch: Launch
    server: _Server
    model: str
    storage: Path | None
    slots: Slots
    norm: FinalNormWeights | None


class VllmServerDriver:
    """Sends requests to a vLLM server. See :class:`hsformat_extractors.hosted.wire.Driver`.

    Options: ``server``, its URL; ``storage``, the folder in which its files are found here (default: the one that the
    server names); ``concurrency``; ``timeout`` in seconds, of one request; ``api_key``, the name of the environment
    variable that holds it.
    """

    def __init__(self) -> None:
        self._session: _Session | None = None
        self._pool: ThreadPoolExecutor | None = None

    def start(self, launch: Launch) -> Mapping[str, Any]:
        """Reach the server; ask for its version, its model and the longest sequence that it takes.

        Raises
        ------
        HsError
            HS410: the server cannot be reached or is none of vLLM, or does not capture a depth of this architecture.
        """
        self.stop()
        options = launch.options
        server = _Server(
            url=options["server"].rstrip("/").removesuffix("/v1"),
            headers={"Content-Type": "application/json", **_authorization(options)},
            timeout=PATIENCE * float(options.get("timeout", TIMEOUT)),
        )
        version, card = _ask_server(server)
        slots = wanted_slots(
            launch.captures,
            version=version,
            architecture=launch.architecture,
            num_layers=launch.num_layers,
            profile=launch.options.get("engine_profile"),
        )
        norm = load_weights(launch.model, final_norm_facts(launch.model)) if slots.normed else None
        storage = Path(options["storage"]) if "storage" in options else None
        self._session = _Session(
            launch=launch, server=server, model=str(card["id"]), storage=storage, slots=slots, norm=norm
        )
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
        ServerDied
            It does not answer any more; what came before was yielded.
        """
        if self._session is None or self._pool is None:
            raise RuntimeError("start() comes first")
        futures: list[Future[Answer | Fault]] = [self._pool.submit(_one, self._session, ask) for ask in asks]
        died: ServerDied | None = None
        try:
            for future in as_completed(futures):
                try:
                    yield future.result()
                except ServerDied as e:
                    died = died or e
                    for other in futures:
                        other.cancel()
                except CancelledError:
                    continue
        finally:
            for future in futures:
                future.cancel()
        if died is not None:
            raise died

    def stop(self) -> None:
        """Let go of the server, which goes on running."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
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
                    fix="start it as python -m hsformat_extractors.hosted.vllm_serve prints, and wait until /health "
                    "answers")
        ) from e  # fmt: skip


def _authorization(options: Mapping[str, str]) -> dict[str, str]:
    name = options.get("api_key")
    return {} if name is None else {"Authorization": f"Bearer {os.environ[name]}"}


def _one(session: _Session, ask: Ask) -> Answer | Fault:
    """Run one request, in a thread."""
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
        choice = told["choices"][0]
        prompt, new = (tuple(int(i) for i in choice[key]) for key in ("prompt_token_ids", "token_ids"))
        path = Path(told["kv_transfer_params"]["hidden_states_path"])
    except urllib.error.HTTPError as e:
        message = f"HTTP {e.code}: {e.read(2000).decode('utf-8', 'replace')}"
        return Fault(request=ask.request, message=message, again=e.code >= 500)
    except (KeyError, IndexError, TypeError) as e:
        message = f"the server's answer lacks {e}: it was not started with a connector for hidden states"
        return Fault(request=ask.request, message=message)
    except (OSError, ValueError) as e:  # refused, reset, timed out, no JSON
        _require_health(server, e)
        return Fault(request=ask.request, message=f"{type(e).__name__}: {e}", again=True)
    answers = launch.max_new_tokens > 0
    answer = Answer(
        request=ask.request,
        tokens=(*prompt, *new) if answers else prompt,
        file=f"{ask.request}.safetensors",
        next_token=new[0] if new and not answers else None,
    )
    return _collect(session, answer, path if session.storage is None else session.storage / path.name)


def _collect(session: _Session, answer: Answer, path: Path) -> Answer | Fault:
    """Wait for a file of the server, and take it into the staging folder in the wire's form."""
    launch, seconds, request = session.launch, session.server.timeout, answer.request
    deadline = time.monotonic() + seconds
    failed, lock = path.with_name(path.name + FAILED), path.with_name(path.name + ".lock")
    while not path.exists() or not _free(lock):
        if failed.exists():
            return not_written(request, failed)
        if time.monotonic() > deadline:
            message = f"{path} did not appear in {seconds:.0f} s: is it a folder that both machines see?"
            _require_health(session.server, TimeoutError(message))
            return Fault(request=request, message=message, again=True)
        time.sleep(_LOOK)
    wanted = Path(launch.staging) / answer.file
    infos = {info.name: info for info in read_header(path)}
    wrong: str | None = None
    if _STOCK in infos:
        wrong = _convert(infos, wanted, session.slots, session.norm)
    elif set(infos) == {*launch.captures, TOKENS}:
        _move(path, wanted)
    else:
        wrong = f"the server writes {', '.join(sorted(infos))}, not {', '.join(launch.captures)}"
    path.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    return answer if wrong is None else Fault(request=request, message=wrong)


def _convert(infos: Mapping[str, TensorInfo], wanted: Path, slots: Slots, norm: FinalNormWeights | None) -> str | None:
    """Write the file of vLLM's own connector in the wire's form; return what is wrong with it."""
    states_TSH, ids = read_tensor(infos[_STOCK]), read_integers(infos[TOKENS])
    if states_TSH.ndim != 3 or states_TSH.shape[1] != len(slots.ids):
        return f"the server captures {list(states_TSH.shape)[1:]} a token, not the layer ids {list(slots.ids)}"
    if ids is None:
        return f"{TOKENS} of dtype {infos[TOKENS].dtype}"
    arrays = {}
    for name, (slot, normed) in slots.keys.items():
        h_TH = np.ascontiguousarray(states_TSH[:, slot])
        arrays[name] = after(norm, h_TH) if normed and norm is not None else h_TH
    part = wanted.with_suffix(".part")
    save_file({**arrays, TOKENS: ids.astype(np.int64)}, part)
    os.replace(part, wanted)
    return None


def _call(server: _Server, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers=dict(server.headers))
    with urllib.request.urlopen(request, timeout=timeout) as response:
        told = json.loads(response.read())
    if not isinstance(told, dict):
        raise ValueError(f"{path} answered {type(told).__name__}, not a JSON object")
    return told


def _require_health(server: _Server, cause: Exception) -> None:
    """Return if the server lives.

    Raises
    ------
    ServerDied
        ``/health`` does not answer.
    """
    request = urllib.request.Request(server.url + "/health", headers=dict(server.headers))
    try:
        with urllib.request.urlopen(request, timeout=_HEALTH):
            return
    except OSError as e:
        raise ServerDied(f"the server at {server.url} does not answer any more: {e} (after {cause})") from e


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
