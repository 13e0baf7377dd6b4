"""A running SGLang server as a driver of extraction: asked over HTTP, its states read from its hook's folder.

It is started with the flags that ``sglang_serve`` prints. The folder has to be seen by both under one name: the same
machine, or one file system.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hsformat.engines.table import parse_version
from hsformat.problems import HsError, Problem, problem
from hsformat.target import describe
from hsformat_extractors.hosted.options import forbidden_problems, request_seconds
from hsformat_extractors.hosted.servers import (
    Leftovers,
    ServerLost,
    authorization,
    check_folder,
    check_served_model,
    how_to_authorize,
    require_health,
)
from hsformat_extractors.hosted.sglang_args import HOOK_FACTORY, version_found
from hsformat_extractors.hosted.sglang_driver import Request, SglangAsker, provenance
from hsformat_extractors.hosted.wire import Answer, Ask, Fault, Launch
from hsformat_extractors.sglang import OTHER_MODEL

__all__ = ["SglangServerDriver"]

_HEALTH_S = 60.0
"""Seconds in which a server that lives says so: it runs a token for it (http_server.py, health_generate)."""
_ANSWER_S = 86_400.0
"""Seconds for one answer, which may wait behind others; a server that does nothing at all is seen before (``run``)."""
_NAMES = f"hs{8 * '[0-9a-f]'}[-.]*"
"""Of the hook's files for our requests (``sglang_hook``)."""
_OLD_S = 21_600.0
"""The first pieces of a long answer wait for its end."""
_QUANTISED = {"quantization", "kv_cache_dtype"}
"""What SGLang reads in the folder of a quantised target."""
_FOLDER_S = 60.0
"""Seconds in which a file that a server on another machine has written is seen here: what NFS remembers of a folder."""
_FLAGS = "start it here with the flags that this prints: python -m hsformat_extractors.hosted.sglang_serve"
_SEEDED = (
    "start it with an accelerator and the flags that this prints: python -m "
    "hsformat_extractors.hosted.sglang_serve --sampled; or let it answer greedily"
)


class SglangServerDriver(SglangAsker):
    """Asks a server that was started with the flags of ``sglang_serve``, on this machine or on the same file system.

    Option ``server``: its URL, such as ``http://127.0.0.1:30000``. It may serve other clients at the same time; what
    the hook writes of their requests is nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._url = ""
        self._headers: dict[str, str] = {}
        self._pool: ThreadPoolExecutor | None = None

    def start(self, launch: Launch) -> Mapping[str, Any]:
        """See :class:`~hsformat_extractors.hosted.wire.Driver`.

        Raises
        ------
        HsError
            HS410: no server there, too old, of another target, or started without what the captures need.
        """
        self._url = launch.options["server"].rstrip("/")
        self._headers = {"Content-Type": "application/json", **authorization(launch.options)}
        info = self._server_info()
        check_served_model(info.get("model_path"), launch.model, url=self._url)
        config = _hook_config(info, launch, self._url)
        folder = Path(config["staging"])
        check_folder(folder, url=self._url, option=None)
        Leftovers(_NAMES, age=max(_OLD_S, 2 * request_seconds(launch.options))).remove(folder)
        self._prepare(launch, folder)
        self._late_s = min(_FOLDER_S, self._stall_s / 2)
        self._pool = ThreadPoolExecutor(max_workers=self.in_flight, thread_name_prefix="sglang")
        try:
            self._try_hook(launch)
        except BaseException:  # raised again: nothing of the start stays
            self.stop()
            raise
        return provenance(info, {"server": self._url, "launch_command": info.get("launch_command")})

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        """See :class:`~hsformat_extractors.hosted.wire.Driver`. What ends the run leaves nothing in the folder."""
        try:
            yield from super().run(asks)
        except Exception:  # raised again
            self.stop()
            raise

    def stop(self) -> None:
        """Let go of the server, which goes on. May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
            self.parts.clear()

    def _submit(self, request: Request) -> Future[Mapping[str, Any]]:
        if self._pool is None:
            raise RuntimeError("start() comes first")
        body = {"input_ids": list(request.ask.prompt), "rid": request.rid,
                "sampling_params": self._sampling(request.ask)}  # fmt: skip
        return self._pool.submit(self._post, "/generate", body)

    def _lost(self, error: OSError) -> HsError:
        return ServerLost(self._url, f"it does not answer any more: {error}")

    def _try_hook(self, launch: Launch) -> None:
        """Run three tokens and see their states arrive here."""
        prompt = tuple(t % launch.vocab_size for t in (1, 2, 3))
        (found,) = self.run([Ask(request="hsformat-trial", prompt=prompt)])
        if isinstance(found, Fault):
            raise HsError(
                problem("HS410", where=f"server {self._url}", got=f"states of a short request: {found.message}",
                        expected="the files of its hook in a folder that this machine sees",
                        fix=_FLAGS)
            )  # fmt: skip
        (Path(launch.staging) / found.file).unlink()

    def _server_info(self) -> Mapping[str, Any]:
        try:
            info = self._post("/server_info", None, seconds=_HEALTH_S)
        except (OSError, ValueError, RuntimeError) as e:
            raise HsError(
                problem("HS410", where=f"server {self._url}", got=str(e), expected="an SGLang server that answers",
                        fix=how_to_authorize(e.__cause__)
                    or "start it, or give its URL: --option server=http://127.0.0.1:30000")
            ) from e  # fmt: skip
        return info

    def _post(self, path: str, body: Mapping[str, Any] | None, *, seconds: float = _ANSWER_S) -> Mapping[str, Any]:
        """Ask the server.

        Raises
        ------
        ValueError
            It refuses the request, or answers no JSON object.
        RuntimeError
            It could not do it (HTTP 5xx).
        ServerLost
            Its engine is dead.
        OSError
            It cannot be reached, breaks off, or does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                found = json.load(response)
        except urllib.error.HTTPError as e:
            said = f"HTTP {e.code}: {e.read().decode('utf-8', errors='replace')[:300]}"
            if e.code < 500:
                raise ValueError(said) from e
            if path == "/generate":
                require_health(self._url, said, seconds=_HEALTH_S, headers=self._headers)
            raise RuntimeError(said) from e
        except HTTPException as e:
            raise ConnectionError(f"the answer breaks off ({type(e).__name__})") from e
        if not isinstance(found, dict):
            raise ValueError(f"no JSON object from {path}")
        return found


def _hook_config(info: Mapping[str, Any], launch: Launch, url: str) -> Mapping[str, Any]:
    """Return the config of the server's hook, after checking that the server can give the captures.

    Raises
    ------
    HsError
        HS410: what is wrong with it, all of it.
    """
    found = version_found(parse_version("sglang", str(info.get("version"))))
    hooks = [h for h in info.get("forward_hooks") or [] if h.get("hook_factory") == HOOK_FACTORY]
    config = hooks[0]["config"] if hooks else None
    graphs = info.get("cuda_graph_config")
    wrong = {
        "its hook": ("none of hsformat", config is None),
        "dtype": (info.get("dtype"), info.get("dtype") not in (launch.dtype, "auto")),
        "disable_radix_cache": (False, not info.get("disable_radix_cache")),
        "pp_size": (info.get("pp_size"), info.get("pp_size", 1) != 1),
        "speculative_algorithm": (info.get("speculative_algorithm"), info.get("speculative_algorithm") is not None),
        "cuda_graph_config": (graphs, _graphs_hide(graphs, launch)),
        "enable_deterministic_inference": (
            f"{info.get('enable_deterministic_inference')}, so that it heeds no seed",
            bool(launch.sampling) and not info.get("enable_deterministic_inference"),
        ),
    }
    found += _of_another_model(info, launch, url)
    found += [
        problem("HS410", where=f"server {url}: {name}", got=got, expected="what gives all states",
                fix=_SEEDED if name == "enable_deterministic_inference" else _FLAGS)
        for name, (got, bad) in wrong.items()
        if bad
    ]  # fmt: skip
    if config is not None:
        there = {*config["aux"], config["before_norm"], config["after_norm"]}
        if missing := [k for k in launch.captures if k not in there]:
            found.append(
                problem("HS410", where=f"server {url}: captures", got=", ".join(sorted(k for k in there if k)),
                        expected=", ".join(launch.captures), fix=f"start it for {', '.join(missing)} as well")
            )  # fmt: skip
        if config["hidden_size"] != launch.hidden_size:
            found.append(
                problem("HS410", where=f"server {url}: hidden size", got=config["hidden_size"],
                        expected=launch.hidden_size, fix="ask the server of this target")
            )  # fmt: skip
    if found or config is None:
        raise HsError(found)
    return dict(config)


def _of_another_model(info: Mapping[str, Any], launch: Launch, url: str) -> Iterator[Problem]:
    """Yield HS410 for what a server was started with that makes another model of its folder.

    It tells the values after SGLang has chosen those that were left to it, such as the dtype of DeepSeek's cache. What
    its command does not name is its own choice, the same as without a server; one that tells no command (0.5.23: it was
    not started from a command line) is taken to have been given all but what a quantised folder says.
    """
    told = {k: v for k in OTHER_MODEL.names if (v := info.get(k)) not in ("", "{}", [], {})}
    flags = _flags(info.get("launch_command"))
    if flags is not None:
        told = {k: v for k, v in told.items() if any(f"--{k.replace('_', '-')}".startswith(f) for f in flags)}
    elif told.keys() & _QUANTISED and _quantised(launch.model):
        told = {k: v for k, v in told.items() if k not in _QUANTISED}
    yield from forbidden_problems(told, [OTHER_MODEL], where=f"server {url}")


def _flags(command: object) -> list[str] | None:
    """Return the flags of a command but ``--model``, some abbreviated; None: they are not known, or stand in a file."""
    if not isinstance(command, str) or command.startswith("Engine("):
        return None
    flags = [word.partition("=")[0] for word in command.split() if word.startswith("--")]
    flags = [f for f in flags if f not in ("--", "--model")]  # others begin like them
    return None if any("--config".startswith(f) for f in flags) else flags


def _quantised(folder: str) -> bool:
    try:
        return describe(folder).model.quantization is not None
    except HsError:  # of a server on another machine, or of a family that cannot be described without running it
        return False


def _graphs_hide(graphs: Any, launch: Launch) -> bool:
    """Return whether CUDA graphs are on for a phase whose states are wanted."""
    if not isinstance(graphs, dict):
        return False
    phases = ("prefill", "decode") if launch.max_new_tokens else ("prefill",)
    return any(graphs.get(p, {}).get("backend", "disabled") != "disabled" for p in phases)
