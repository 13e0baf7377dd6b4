"""SGLang as a driver of extraction, its engine in children of this process. A running server: ``sglang_server``.

Both give the engine token ids and a request id; the hook (``sglang_hook``) writes the states from inside the scheduler,
and when the engine has answered, the pieces are joined (``sglang_parts``) and compared with what was sent. Nothing of
SGLang is patched. A fault of SGLang's scheduler kills the process that started it, which is this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import secrets
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hsformat.problems import HsError
from hsformat_extractors.hosted.beat import Beat
from hsformat_extractors.hosted.options import request_seconds
from hsformat_extractors.hosted.sglang_args import engine_arguments, plan_captures
from hsformat_extractors.hosted.sglang_parts import Incomplete, Parts
from hsformat_extractors.hosted.wire import Answer, Ask, Fault, Launch

__all__ = ["Request", "SglangAsker", "SglangDriver", "provenance"]

_POLL_S = 0.2


class SglangAsker(ABC):
    """What the engine and a server have in common: requests in flight, and what becomes of their answers."""

    in_flight: ClassVar[int] = 256
    """Requests that the engine has at a time; how much they may stage is seen to by who gives them."""

    _launch: Launch
    _parts: Parts | None = None
    _asked: int = 0
    _stall_s: float = 0.0
    """An engine that neither answers nor leaves a file for so long is given up; its own watchdog ends it after 300."""
    _late_s: float = 0.0
    """Seconds for which states are waited for when SGLang has answered; on a disk of this machine they are there."""
    _died: bool = False
    """It has said that one of its processes ended or failed."""

    def __init__(self) -> None:
        self.beat = Beat()

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        """See :class:`~hsformat_extractors.hosted.wire.Driver`. New requests are given as answers are taken."""
        waiting, flying = deque(asks), dict[Future[Mapping[str, Any]], Request]()
        late: dict[Future[Mapping[str, Any]], float] = {}  # answered, and their states are still waited for
        parts, moved = self.parts, time.monotonic()
        while waiting or flying:
            while waiting and len(flying) < self.in_flight:
                self._asked += 1
                request = Request(rid=f"{parts.run}-{self._asked}", ask=waiting.popleft())
                parts.expect(request.rid)
                flying[self._submit(request)] = request
            done, _ = wait(flying.keys() - late.keys(), timeout=_POLL_S, return_when=FIRST_COMPLETED)
            if late and not done:
                time.sleep(_POLL_S)
            if parts.look() or done:
                moved = time.monotonic()
                self.beat()
            elif self._died:
                raise self._lost(ChildProcessError("a process of it has died"))
            elif time.monotonic() - moved > self._stall_s:
                nothing = f"nothing came for {self._stall_s:g} s, with {len(flying)} requests in hand"
                raise self._lost(TimeoutError(nothing))
            for future in [*done, *late]:
                request = flying[future]
                try:
                    answer = self._finish(request, future)
                except Incomplete as e:
                    now = time.monotonic()
                    if now < late.setdefault(future, now + self._late_s):
                        continue
                    answer = Fault(request=request.ask.request, message=str(e), again=True)
                del flying[future]
                late.pop(future, None)
                parts.drop(request.rid)
                yield answer

    @abstractmethod
    def _submit(self, request: Request) -> Future[Mapping[str, Any]]:
        """Give a request to the engine; the future has SGLang's response."""

    def _prepare(self, launch: Launch, folder: Path) -> None:
        self._launch = launch
        self._stall_s = request_seconds(launch.options)
        self._parts = Parts(folder, f"hs{secrets.token_hex(4)}", launch.captures)

    @property
    def parts(self) -> Parts:
        """Return the pieces of this run."""
        if self._parts is None:
            raise RuntimeError("start() comes first")
        return self._parts

    def _finish(self, request: Request, future: Future[Mapping[str, Any]]) -> Answer | Fault:
        """Return what came of a request that the engine is done with.

        Raises
        ------
        Incomplete
            Its states are not all there, yet or at all.
        """
        ask, launch = request.ask, self._launch
        if isinstance(error := future.exception(), HsError):
            raise error
        if isinstance(error, OSError):
            raise self._lost(error) from error
        if error is not None:
            # SGLang raises ValueError for a request that it refuses, too long for one.
            return Fault(request=ask.request, message=f"{type(error).__name__}: {error}",
                         again=not isinstance(error, ValueError))  # fmt: skip
        response = future.result()
        if reason := _not_finished(response):
            return Fault(request=ask.request, message=reason, again=True)
        answers = self._new_tokens(ask) > 0
        written = tuple(response.get("output_ids", ()))
        new = written if answers else ()
        if answers and not new:
            return Fault(request=ask.request, message="the engine wrote no token", again=True)
        sent = (*ask.prompt, *new)
        # The last token that is written is never run.
        rows, name = len(sent) - (1 if new else 0), f"{ask.request}.safetensors"
        try:
            ran = self.parts.take(request.rid, rows, Path(launch.staging) / name)
        except Incomplete as e:
            raise Incomplete(f"{e} (SGLang ran {rows} tokens)") from e
        if ran != list(sent[:rows]):
            k = next(i for i, (a, b) in enumerate(zip(ran, sent, strict=False)) if a != b)
            message = f"the states' token {k} is {ran[k]}, that of the request {sent[k]}"
            return Fault(request=ask.request, message=message, again=True)
        next_token = None if answers or not written else written[0]
        return Answer(request=ask.request, tokens=sent, file=name, next_token=next_token)

    def _lost(self, error: OSError) -> Exception:
        """Return what ends the run where SGLang does not answer any more."""
        return RuntimeError(f"SGLang does not answer any more: {error}")

    def _sampling(self, ask: Ask) -> dict[str, Any]:
        """Return the sampling parameters of a request."""
        launch, limit = self._launch, self._new_tokens(ask)
        if not limit:
            # Its token is thrown away: a request for none takes another way through the engine.
            return {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        out: dict[str, Any] = {**_NEUTRAL, "max_new_tokens": limit, "temperature": 0.0, "no_stop_trim": True}
        out |= {k: v for k in ("temperature", "top_p", "top_k") if (v := launch.sampling.get(k)) is not None}
        if launch.stop_token_ids:
            out["stop_token_ids"] = list(launch.stop_token_ids)
        else:
            out["ignore_eos"] = True
        if ask.seed is not None:
            out["sampling_seed"] = ask.seed % 2**31  # heeded with enable_deterministic_inference alone
        return out

    def _new_tokens(self, ask: Ask) -> int:
        limit = self._launch.max_new_tokens
        return limit if ask.max_new_tokens is None else min(limit, ask.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of the caller and the engine's id of it."""

    rid: str
    ask: Ask


class SglangDriver(SglangAsker):
    """Starts ``sglang.Engine``; see :class:`~hsformat_extractors.hosted.wire.Driver`.

    Without an accelerator its processes are forks of this one, which has imported all of it: SGLang spawns two, and
    imports of 16 and 19 s of CPU are most of what a start costs. CUDA does not survive a fork.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, launch: Launch) -> Mapping[str, Any]:
        """See :class:`~hsformat_extractors.hosted.wire.Driver`.

        Raises
        ------
        HsError
            HS410, HS304: this SGLang cannot give these captures; nothing was loaded.
        """
        plan = plan_captures(importlib.metadata.version("sglang"), launch)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        cpu = not _accelerator()
        if cpu:
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            _fork_from_now_on()
        arguments = engine_arguments(launch, plan, staging=launch.staging, cpu=cpu)
        self._prepare(launch, Path(launch.staging))
        context = _context(launch.model)
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        local = {"skip_server_warmup": True, "log_level": "warning", "context_length": context + _MARGIN}
        self._engine = importlib.import_module("sglang").Engine(**{**local, **arguments})
        info = self._engine.get_server_info()
        self._loop = self._engine.loop
        self._thread = threading.Thread(target=self._engine.loop.run_forever, name="sglang", daemon=True)
        self._thread.start()
        self._heed_signals()
        told = provenance(info, {k: v for k, v in arguments.items() if k not in ("model_path", "forward_hooks")})
        return {**told, "max_tokens": min(told["max_tokens"], context)}

    def stop(self) -> None:
        """End the engine. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
        engine.shutdown()
        self.parts.clear()

    def _heed_signals(self) -> None:
        """Take back the signals that SGLang has given to its event loop, which heeds none outside of the main thread.

        SIGQUIT is what a scheduler that failed sends to its parent, and SGLang's watchdog to itself when a process was
        killed (0.5.23, managers/tokenizer_manager.py and utils/watchdog.py). Until here it ended this process.
        """

        def died(*_: object) -> None:
            self._died = True

        signal.signal(signal.SIGQUIT, died)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _submit(self, request: Request) -> Future[Mapping[str, Any]]:
        if self._engine is None or self._loop is None:
            raise RuntimeError("start() comes first")
        answer = self._engine.async_generate(
            input_ids=list(request.ask.prompt), rid=request.rid, sampling_params=self._sampling(request.ask)
        )
        return asyncio.run_coroutine_threadsafe(answer, self._loop)


_NEUTRAL = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""Said to a server as well, which may have preferences of its own (0.5.23, ``preferred_sampling_params``)."""

_MARGIN = 8
"""More context than the target has, of which no token is run: a prompt has to be 7 shorter than it (``provenance``)."""


def _context(model: str) -> int:
    """Return the longest sequence that the target takes, as SGLang finds it."""
    known = importlib.import_module("sglang.srt.utils.hf_transformers_utils")
    config = known.get_hf_text_config(known.get_config(model, trust_remote_code=False))
    return int(known.get_context_length(config))


def _accelerator() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


def _fork_from_now_on() -> None:
    """Import what all processes of SGLang import, and let them be forked. No thread of torch may be running."""
    for name in ("sglang", "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"):
        importlib.import_module(name)
    with contextlib.suppress(RuntimeError):
        multiprocessing.set_start_method("fork", force=True)
    # SGLang sets it to "spawn" whenever an engine starts.
    vars(multiprocessing)["set_start_method"] = lambda *_args, **_options: None


def _not_finished(response: Mapping[str, Any]) -> str | None:
    """Return why an answer is not what the target said."""
    reason = response.get("meta_info", {}).get("finish_reason") or {}
    if reason.get("type") == "abort":
        return f"the engine gave it up: {reason.get('message')}"
    # Its own words for logits that are no numbers (managers/schedule_batch.py); the token in their place is made up.
    return "logits that are no numbers" if reason.get("matched") == "NaN happened" else None


def provenance(info: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``start`` gives.

    In 0.5.23 a prompt has to be shorter than ``max_req_input_len`` (managers/utils.py), which is 6 less than the
    context or the cache (managers/tp_worker.py); prompt and answer together may have 4 more, which are left alone.
    """
    versions = {"sglang": str(info["version"])}
    for package in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "versions": versions,
        "device": str(info.get("device")),
        "engine": json.loads(json.dumps(engine, default=str)),
        "max_tokens": int(info["max_req_input_len"]) - 1,
    }
