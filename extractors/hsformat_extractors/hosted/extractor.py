"""The extractor of an engine in a process of its own: what all of them share. A subclass names its engine.

Importing this brings neither torch nor an engine. See ``wire`` for the driver that a subclass names.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from hsformat.engines.rows import CaptureRow
from hsformat.engines.table import capture_row, parse_version
from hsformat.extraction.protocol import ExtractionRequest, Rejected
from hsformat.problems import HsError, Problem, Severity, problem
from hsformat.record import Record, TokenSample
from hsformat_extractors._preflight import batch_problems, capture_problems, generation_problems
from hsformat_extractors._stops import end_of_turn_ids, special_ids
from hsformat_extractors.hosted.child import HostedEngine
from hsformat_extractors.hosted.flow import Flow, Limits
from hsformat_extractors.hosted.options import (
    SHARED,
    EngineOption,
    Forbidden,
    Settings,
    option_problems,
    without_secrets,
)
from hsformat_extractors.hosted.preflight import (
    Ends,
    bytes_of_token,
    capture_row_problems,
    installed_version,
    longest_bytes,
    version_problems,
)
from hsformat_extractors.hosted.proof import prove
from hsformat_extractors.hosted.staging import Staging, space_problems
from hsformat_extractors.hosted.wire import Launch

__all__ = ["HostedExtractor"]


@dataclass(kw_only=True)
class _Loaded:
    """An engine that runs and passed the proof."""

    request: ExtractionRequest
    settings: Settings
    staging: Staging
    engine: HostedEngine
    flow: Flow
    told: Mapping[str, Any]


class HostedExtractor:
    """Extracts with an engine in a child process. See :class:`hsformat.extraction.protocol.Extractor`."""

    name: ClassVar[str]
    """As in ``--engine``, and in the tables of ``hsformat.engines``."""
    package: ClassVar[str]
    """The module that the engine's distribution brings."""
    minimum: ClassVar[str]
    """The oldest version that the driver works with."""
    install: ClassVar[str]
    """The command that brings it."""
    driver: ClassVar[str]
    """``module:class`` of the :class:`~hsformat_extractors.hosted.wire.Driver` that runs the engine."""
    server_driver: ClassVar[str | None] = None
    """The one that uses a running server (``--option server=URL``); None: there is none."""
    beyond: ClassVar[tuple[Ends, ...]] = ()
    """Captures that the driver takes without the engine's list of layers."""
    applies_norm: ClassVar[bool] = False
    """Whether the driver makes depth N after the final norm from the one before it."""
    options: ClassVar[tuple[EngineOption, ...]] = ()
    """Options of this engine beside the shared ones."""
    for_servers: ClassVar[tuple[str, ...]] = ("api_key",)
    """Names of options that mean something beside ``server`` alone."""
    forbidden: ClassVar[tuple[Forbidden, ...]] = ()
    """Arguments that ``engine_args`` must not hold."""
    can_generate: ClassVar[bool] = True
    """Whether the driver writes answers."""

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None

    # For subclasses.

    def environment(self, request: ExtractionRequest) -> dict[str, str]:
        """Return variables that the engine's process needs."""
        del request
        return {}

    def version(self) -> str | None:
        """Return the installed version of the engine, found without importing it; None: it is not installed."""
        return installed_version(self.package)

    def capture_row(self, version: str, request: ExtractionRequest, settings: Settings) -> CaptureRow:
        """Return what is known of how a version captures the layers of this target.

        Raises
        ------
        ResolveError
            HS410: nothing.
        """
        return capture_row(self.name, version, request.target.architecture, settings.profile, since=self.minimum)

    def further_problems(self, request: ExtractionRequest) -> Iterable[Problem]:
        """Return what else this engine cannot do, before it is started."""
        del request
        return ()

    # The protocol.

    def preflight(self, request: ExtractionRequest) -> list[Problem]:
        """Return all reasons why this request cannot be done, before the engine is imported."""
        known = {o.name: o for o in (*SHARED, *self.options)}
        out = [*option_problems(request.options, known, self.forbidden, self.name)]
        settings = None if _errors(out) else Settings.of(request.options)
        out += [*batch_problems(request), *capture_problems(request), *generation_problems(request)]
        if request.generation.mode != "none":
            out += self._generation(request)
        out += self.further_problems(request)
        if "server" not in request.options:
            out += [
                problem("HS410", where=f"option {name}", got=request.options[name], expected="an option server",
                        fix="remove it, or give --option server=URL")
                for name in self.for_servers
                if name in request.options
            ]  # fmt: skip
        if settings is None:
            return out
        out += space_problems(settings.staging, settings.staging_bytes, longest_bytes(request))
        if settings.server is not None:
            if self.server_driver is None:
                out.append(
                    problem("HS410", where="option server", got=settings.server, expected="no server",
                            fix=f"{self.name} is run in a process of its own: leave the option out")
                )  # fmt: skip
            out += [
                problem("HS410", where=f"option {name}", got=request.options[name], expected="none beside server",
                        fix="start the server with it, and remove it here")
                for name in ("tensor_parallel", "data_parallel", "engine_args")
                if name in request.options
            ]  # fmt: skip
            return out  # which version a server has is known when it is reached
        version = self.version()
        found = [
            *version_problems(self.name, version, package=self.package, minimum=self.minimum, install=self.install)
        ]
        return [*out, *found] if found or version is None else [*out, *self._rows(version, request, settings)]

    def load(self, request: ExtractionRequest) -> None:
        """Start the engine, and prove on short requests that its states are what the request says (``proof``).

        Raises
        ------
        HsError
            HS410: the engine cannot be started, died, hung, or has an unknown version; HS506: no space in staging.
            Otherwise what the proof found.
        ForeignFileError
            HS411, HS602: the target's embedding, final norm or head cannot be read.
        """
        self.close()
        settings = Settings.of(request.options)
        generating = request.generation.mode != "none"
        stops = tuple(end_of_turn_ids(request.model)) if generating else ()
        try:
            staging = Staging(settings.staging)
        except OSError as e:
            raise HsError(_no_staging(settings.staging, e)) from e
        engine = None
        try:
            engine = self._engine(request, settings, staging)
            told = engine.start(self._launch(request, staging, stops))
            if settings.server is not None:
                self._check_server(told, request, settings)
            flow = Flow(
                name=self.name,
                engine=engine,
                request=request,
                staging=staging.folder,
                limits=self._limits(told, request, settings),
                stop_token_ids=stops,
            )
            prove(flow, forbidden=[i for i in special_ids(request.model) if i < request.target.vocab_size])
        except BaseException:  # Ctrl-C as well, raised again: no engine and no staged file stays
            if engine is not None:
                engine.close(orderly=False)
            staging.close()
            raise
        self._loaded = _Loaded(request=request, settings=settings, staging=staging, engine=engine, flow=flow, told=told)

    def extract(
        self, samples: Iterable[TokenSample], *, stopping: Callable[[], bool] = lambda: False
    ) -> Iterator[Record | Rejected]:
        """Yield one record or rejection for each sample, as answers come.

        Once ``stopping()`` is true, the requests that the engine has begun are finished, and no others begun.

        Raises
        ------
        RuntimeError
            Nothing is loaded.
        HsError
            As :meth:`hsformat_extractors.hosted.flow.Flow.extract`.
        """
        return self._require().flow.extract(samples, stopping)

    def producer(self) -> dict[str, Any]:
        """Return provenance: packages and versions, device, what the engine was started with."""
        loaded = self._require()
        told = loaded.told
        options = {k: v for k, v in loaded.request.options.items() if k not in ("server", "staging", "api_key")}
        return {
            "name": self.name,
            "versions": {**told.get("versions", {}), "hsformat": importlib.metadata.version("hsformat")},
            "device": told.get("device"),
            "dtype": loaded.request.target.dtype,
            "engine": without_secrets(told.get("engine", {})),
            "max_tokens": loaded.flow.limits.max_tokens,
            "batch_tokens": loaded.request.batch_tokens,
            "options": without_secrets(options),
            "server": None if loaded.settings.server is None else urlsplit(loaded.settings.server).hostname,
        }

    def close(self) -> None:
        """End the engine and remove what is staged. May be called twice."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.engine.close()
            loaded.staging.close()

    # Parts.

    def _generation(self, request: ExtractionRequest) -> list[Problem]:
        if not self.can_generate:
            return [
                problem("HS410", where="generation", got=request.generation.mode, expected="none",
                        fix=f"{self.name} only runs what it is given: leave --generate out")
            ]  # fmt: skip
        try:
            end_of_turn_ids(request.model)
        except HsError as e:
            return e.problems
        return []

    def _rows(self, version: str, request: ExtractionRequest, settings: Settings) -> list[Problem]:
        try:
            row = self.capture_row(version, request, settings)
        except HsError as e:
            return e.problems
        return [
            *capture_row_problems(self.name, version, request, row, beyond=self.beyond, applies_norm=self.applies_norm)
        ]

    def _check_server(self, told: Mapping[str, Any], request: ExtractionRequest, settings: Settings) -> None:
        version = told.get("versions", {}).get(self.package)
        if not isinstance(version, str):
            raise HsError(
                problem("HS410", where=f"server {settings.server}", got="no version",
                        expected=f"that of {self.package}", fix="use a server that tells its version")
            )  # fmt: skip
        version = parse_version(self.name, version)
        found = [
            *version_problems(self.name, version, package=self.package, minimum=self.minimum, install=self.install)
        ]
        if problems := _errors(found or self._rows(version, request, settings)):
            raise HsError(problems)

    def _engine(self, request: ExtractionRequest, settings: Settings, staging: Staging) -> HostedEngine:
        driver = self.driver if settings.server is None else self.server_driver
        assert driver is not None  # preflight refuses a server otherwise
        handle, log = tempfile.mkstemp(prefix=f"hsformat-{self.name}-", suffix=".log")
        os.close(handle)
        return HostedEngine(
            name=self.name,
            driver=driver,
            log=Path(log),
            environment=self.environment(request),
            staging=staging,
            start_seconds=settings.start_timeout,
            seconds=settings.timeout,
        )

    def _launch(self, request: ExtractionRequest, staging: Staging, stops: tuple[int, ...]) -> Launch:
        target, generation = request.target, request.generation
        names = ("temperature", "top_p", "top_k", "seed")
        sampling = {k: v for k in names if (v := getattr(generation, k)) is not None}
        return Launch(
            model=os.fspath(request.model.absolute()),
            architecture=target.architecture,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=target.dtype,
            captures=tuple(c.key for c in request.captures),
            staging=os.fspath(staging.folder),
            batch_tokens=request.batch_tokens,
            max_new_tokens=(generation.max_new_tokens or 0) if generation.mode != "none" else 0,
            sampling=sampling if generation.mode == "sampled" else {},
            stop_token_ids=stops,
            options=dict(request.options),
        )

    def _limits(self, told: Mapping[str, Any], request: ExtractionRequest, settings: Settings) -> Limits:
        max_tokens = told.get("max_tokens")
        if type(max_tokens) is not int or max_tokens < 1:
            raise HsError(
                problem("HS410", where=f"engine {self.name}: max_tokens", got=max_tokens, expected="a number of tokens",
                        fix="a defect of the extractor's driver")
            )  # fmt: skip
        return Limits(
            max_tokens=max_tokens,
            staged_bytes=settings.staging_bytes,
            token_bytes=bytes_of_token(request),
            window=settings.window,
        )

    def _require(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("load() comes first")
        return self._loaded


def _errors(problems: Iterable[Problem]) -> list[Problem]:
    return [p for p in problems if p.severity is Severity.ERROR]


def _no_staging(root: Path, e: OSError) -> Problem:
    return problem("HS506", where=f"staging {root}", severity=Severity.ERROR, got=e.strerror or type(e).__name__,
                   expected="a folder that can be written to", fix="give --option staging=FOLDER")  # fmt: skip
