"""Profiles: what a probe proved of one engine version and one target architecture, as a file.

``--engine-profile FILE`` makes hsformat accept a version that its tables do not know. A profile holds rows of the same
form as the tables (``rows``), with evidence ``proved``, what was measured, and its own digest, so that a file that was
edited is refused: what somebody states without a proof is a custom layout (``custom``), not a profile. May import
``rows`` and everything below it.

>>> from hsformat.engines.profile import EngineProfile, load_profile, save_profile  # doctest: +SKIP
>>> save_profile(profile, "vllm-0.34.0-llama.json")  # doctest: +SKIP
>>> load_profile("vllm-0.34.0-llama.json").digest == profile.digest  # doctest: +SKIP
True
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from hsformat.digests import digest_json
from hsformat.engines.rows import CaptureRow, DraftRow
from hsformat.models import FromList, Frozen
from hsformat.problems import ForeignFileError, NothingToOpen, Problem, problem
from hsformat.strict_json import parse_json

__all__ = ["EngineProfile", "Measurement", "load_profile", "save_profile"]


class Measurement(Frozen):
    """One thing that was asked of the engine, and what came back.

    Attributes
    ----------
    asked
        What the draft's config said, for example ``ids [1, 5, 10]``, ``no ids``, ``norm_before_residual true``.
    depths
        Depths that the draft was fed, in the order in which it was fed them; empty: it says nothing about depths.
    relative_error
        Largest relative L2 error of a slot against Transformers in float32; null: not a number that was compared.
    runner_up
        Smallest relative L2 error of a slot against any other depth: the proof is worth this distance.
    outcome
        In words, where there is more to say: ``refused``, ``crashed: ...``.
    """

    asked: Annotated[str, Field(min_length=1)]
    depths: Annotated[tuple[int, ...], FromList]
    relative_error: Annotated[float, Field(ge=0)] | None
    runner_up: Annotated[float, Field(ge=0)] | None
    outcome: str | None


class EngineProfile(Frozen):
    """What was proved of an engine's version.

    Attributes
    ----------
    engine, version
        As ``--engine`` and ``--engine-version`` name them.
    architecture
        Of the target that it was proved with.
    captures
        How its depths are numbered; of this version and this architecture alone.
    drafts
        What is made of draft folders, one row a config layout that was proved. Empty: nothing was; the tables must
        then know the version.
    environment
        Versions of packages and the device, by name.
    measurements
        What was asked and seen.
    """

    profile_version: Literal["1"]
    engine: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1)]
    architecture: Annotated[str, Field(min_length=1)]
    captures: CaptureRow
    drafts: Annotated[tuple[DraftRow, ...], FromList]
    environment: dict[str, str]
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1), FromList]

    @model_validator(mode="after")
    def _one_version(self) -> Self:
        for row in (self.captures, *self.drafts):
            if row.evidence != "proved":
                raise ValueError(f"a profile holds what was proved, not what was {row.evidence}")
            if row.versions != (self.version,):
                raise ValueError(f"rows of versions {list(row.versions)} in a profile of {self.version}")
        if self.captures.architectures != (self.architecture,):
            raise ValueError(f"captures of {list(self.captures.architectures)}, proved with {self.architecture}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON-able data, without its digest."""
        data: dict[str, Any] = self.model_dump(mode="json")
        return data

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of the profile."""
        return digest_json(self.to_json())


def save_profile(profile: EngineProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, its digest last; a file at this path is replaced whole.

    Raises
    ------
    OSError
        It cannot be written.
    """
    target = Path(path)
    text = json.dumps({**profile.to_json(), "digest": profile.digest}, indent=1, ensure_ascii=False)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(f"{text}\n", encoding="utf-8")
    part.replace(target)


def load_profile(path: str | os.PathLike[str]) -> EngineProfile:
    """Read a profile.

    Raises
    ------
    NothingToOpen
        HS602: there is no such file.
    ForeignFileError
        HS602: not JSON. HS603: not a profile of this version, each field by name. HS504: its digest is another one.
    """
    file = Path(path)
    if not file.is_file():
        raise NothingToOpen(problem("HS602", where=str(file), got="no such file", expected="an engine profile"))
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ForeignFileError(problem("HS602", where=str(file), got=e, expected="a profile as JSON")) from e
    if not isinstance(data, dict):
        got = f"a JSON {type(data).__name__}"
        raise ForeignFileError(problem("HS602", where=str(file), got=got, expected="an object"))
    stated = data.pop("digest", None)
    try:
        profile = EngineProfile.model_validate_json(json.dumps(data))
    except ValidationError as e:
        raise ForeignFileError(_field_problems(e, file)) from e
    if stated != profile.digest:
        fix = "probe again; what is stated and not proved belongs into a custom layout (--engine custom:layout.json)"
        where = f"{file}: digest"
        raise ForeignFileError(problem("HS504", where=where, got=stated, expected=profile.digest, fix=fix))
    return profile


def _field_problems(error: ValidationError, file: Path) -> list[Problem]:
    fix = "probe again with this version of hsformat"
    out = []
    for err in error.errors(include_url=False):
        name = ".".join(str(p) for p in err["loc"]) or "profile"
        got = "no such field" if err["type"] == "missing" else repr(err["input"])[:200]
        out.append(problem("HS603", where=f"{file}: {name}", got=got, expected=err["msg"], fix=fix))
    return out
