"""A probe from beginning to end: targets, drafts, one engine run a trial, comparison, profile.

Imports neither torch nor an engine; torch is imported when targets are made.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt
from packaging.version import Version

import hsformat
from hsformat.engines.probing import ProbeRequest
from hsformat.engines.profile import EngineProfile, Measurement
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.engines.targets import target_facts
from hsformat.problems import HsError, Problem, ResolveError, problem
from hsformat_extractors.probes import tiny
from hsformat_extractors.probes.analysis import TOLERANCE, Tried, identify, prove_captures
from hsformat_extractors.probes.child import Answer, EngineChild
from hsformat_extractors.probes.draft_math import Target
from hsformat_extractors.probes.draft_proof import ServedDraft, claimed_row, prove_drafts
from hsformat_extractors.probes.draft_trials import draft_trials
from hsformat_extractors.probes.serve import Job
from hsformat_extractors.probes.trials import DEPTHS, Trial, capture_trials

__all__ = ["Probe"]

States = Mapping[str, npt.NDArray[Any]]


class Probe:
    """What the probes of all engines share; a subclass names its engine. Construction is cheap."""

    name: ClassVar[str]
    """As in ``--engine``."""
    package: ClassVar[str]
    """The module that is imported."""
    install: ClassVar[str]
    """The command that brings it."""
    driver: ClassVar[str]
    """``module:class`` of its :class:`~hsformat_extractors.probes.serve.Driver`."""

    def environment(self) -> dict[str, str]:
        """Return variables that the engine's process needs."""
        return {}

    def version(self) -> str:
        """Return the version that is installed, without its local part.

        Raises
        ------
        ResolveError
            HS410: none is.
        """
        names = importlib.metadata.packages_distributions().get(self.package, [])
        if importlib.util.find_spec(self.package) is None or not names:
            raise ResolveError(
                problem("HS410", where=f"probe of {self.name}", got=f"no package {self.package} in this environment",
                        expected="the engine that is to be probed", fix=self.install)
            )  # fmt: skip
        return Version(importlib.metadata.version(names[0])).public

    def probe(self, request: ProbeRequest) -> EngineProfile:
        """Run the engine and return what was proved.

        Raises
        ------
        ResolveError, HsError
            HS410: the engine or what it needs is not installed, it cannot serve a draft with this target, or no single
            rule describes what it did. HS205, HS411, HS602: Transformers cannot run the target.
        """
        version = self.version()
        _require("torch", "transformers")
        with tempfile.TemporaryDirectory(prefix="hsformat-probe-") as name:
            folder = Path(name)
            targets = {n: self._target(folder, request, n) for n in DEPTHS}
            tried = list(self._try(folder, request, targets))
            row = prove_captures(
                tried,
                architecture=request.architecture,
                version=version,
                source=f"hsformat engines probe (hsformat {hsformat.__version__}): random targets of {DEPTHS[0]} and "
                f"{DEPTHS[1]} layers, what the draft's fc was given, against Transformers in float32",
            )
            drafts, figures = self._drafts(folder, request, row, targets) if request.drafts else ((), ())
        return EngineProfile(
            profile_version="1",
            engine=self.name,
            version=version,
            architecture=request.architecture,
            captures=row,
            drafts=drafts,
            environment=_environment(self.package, version, request.dtype),
            measurements=(*(t.measurement() for t in tried), *figures),
        )

    def _target(self, folder: Path, request: ProbeRequest, num_layers: int) -> Target:
        from hsformat_extractors.probes.reference import reference

        request.report(f"a random {request.architecture} of {num_layers} layers, run by Transformers in float32")
        path = folder / f"target-{num_layers}"
        tiny.save_target(path, request.architecture, num_layers, dtype=request.dtype)
        return reference(path, tiny.PROMPT, num_layers)

    def _try(self, folder: Path, request: ProbeRequest, targets: Mapping[int, Target]) -> Iterator[Tried]:
        child = self._child(folder, request)
        shown: dict[str, bool] = {}
        try:
            for trial in capture_trials():
                if trial.instead_of is not None and shown[trial.instead_of]:
                    continue
                config = tiny.draft_config(trial.keys, dtype=request.dtype)
                tiny.write_draft(folder / trial.name / "draft", config, tiny.draft_weights(trial.slots))
                answer = child.ask(_job(folder, trial.name, trial.num_layers, trial.slots, request.dtype))
                if not shown and answer.features_TW is None:
                    raise ResolveError(self._unable(request, answer))
                tried = _tried(trial, answer, targets[trial.num_layers].states, TOLERANCE[request.dtype])
                shown[trial.name] = tried.slots is not None
                request.report(f"{trial.asked} -> {_words(tried)}")
                yield tried
        finally:
            child.close()

    def _drafts(
        self, folder: Path, request: ProbeRequest, captures: CaptureRow, targets: Mapping[int, Target]
    ) -> tuple[tuple[DraftRow], tuple[Measurement, ...]]:
        n, claim = DEPTHS[0], claimed_row(self.name)
        row, figures = prove_drafts(
            list(self._serve_drafts(folder, request, n)),
            claim,
            captures,
            engine=self.name,
            facts=target_facts(folder / f"target-{n}"),
            target=targets[n],
            tolerance=TOLERANCE[request.dtype],
            source=f"hsformat engines probe (hsformat {hsformat.__version__}): logits of two drafted tokens of "
            f"{len(draft_trials())} folders against NumPy",
        )
        request.report(f"{len(figures)} draft folders are served as hsformat reads them")
        return (row,), figures

    def _serve_drafts(self, folder: Path, request: ProbeRequest, num_layers: int) -> Iterator[ServedDraft]:
        child = self._child(folder, request)
        try:
            for trial in draft_trials():
                name = f"draft-{trial.name}"
                path = folder / name / "draft"
                tiny.write_draft(path, trial.config(request.dtype), trial.tensors())
                answer = child.ask(_job(folder, name, num_layers, trial.slots, request.dtype))
                outcome = None if answer.logits else answer.outcome
                request.report(f"draft: {trial.asked} -> {outcome or 'served'}")
                yield ServedDraft(trial=trial, folder=path, logits=answer.logits, outcome=outcome)
        finally:
            child.close()

    def _child(self, folder: Path, request: ProbeRequest) -> EngineChild:
        log = folder / "engine.log"
        return EngineChild(self.driver, log=log, seconds=request.seconds, environment=self.environment())

    def _unable(self, request: ProbeRequest, answer: Answer) -> Problem:
        """Return why the engine is not asked further: ids that every engine can capture showed nothing."""
        printed = "".join(f"\n    {line}" for line in answer.last_lines)
        return problem(
            "HS410",
            where=f"probe of {self.name}, {request.architecture}",
            got=f"{answer.outcome}{printed}",
            expected="an engine that serves an EAGLE-3 draft with this architecture, on this machine",
            fix="run the engine by itself with such a draft; it may not support the architecture, device or dtype",
        )


def _job(folder: Path, name: str, num_layers: int, slots: int, dtype: str) -> Job:
    return Job(
        target=str(folder / f"target-{num_layers}"),
        draft=str(folder / name / "draft"),
        out=str(folder / name / "out"),
        prompt=tiny.PROMPT,
        slots=slots,
        hidden=tiny.HIDDEN,
        vocabularies=(tiny.DRAFT_VOCAB, tiny.VOCAB),
        dtype=dtype,
    )


def _tried(trial: Trial, answer: Answer, states: States, tolerance: float) -> Tried:
    if answer.features_TW is None:
        return Tried(trial=trial, slots=None, outcome=answer.outcome)
    wanted = (len(tiny.PROMPT), trial.slots * tiny.HIDDEN)
    if answer.features_TW.shape != wanted:
        outcome = f"fc was given {list(answer.features_TW.shape)}, not {list(wanted)}"
        return Tried(trial=trial, slots=None, outcome=outcome)
    features_TKH = answer.features_TW.reshape(wanted[0], trial.slots, tiny.HIDDEN)
    try:
        return Tried(trial=trial, slots=identify(features_TKH, states, tolerance=tolerance))
    except HsError as e:
        return Tried(trial=trial, slots=None, outcome="; ".join(f"{p.where}: {p.got}" for p in e.problems))


def _words(tried: Tried) -> str:
    if tried.slots is None:
        return str(tried.outcome)
    m = tried.measurement()
    return f"[{', '.join(s.key for s in tried.slots)}], relative error {m.relative_error:.1e}, next {m.runner_up:.1e}"


def _require(*packages: str) -> None:
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        raise ResolveError(
            problem("HS410", where="probe", got=f"not installed: {', '.join(missing)}",
                    expected="Transformers, which the engine is compared with",
                    fix="pip install 'hsformat[transformers]'")
        )  # fmt: skip


def _environment(package: str, version: str, dtype: str) -> dict[str, str]:
    import torch

    packages: Sequence[str] = ("torch", "transformers", "numpy")
    return {
        package: version,
        **{p: importlib.metadata.version(p) for p in packages},
        "hsformat": hsformat.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": dtype,
    }
