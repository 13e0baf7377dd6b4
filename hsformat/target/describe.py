"""From a model folder to what a contract says of the target. Nothing is loaded; no engine and no torch is imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from hsformat.contract import Embedding, FinalNorm, Head, StateDtype, TargetModel
from hsformat.digests import digest_bytes, digest_json
from hsformat.problems import ForeignFileError, Problem, problem
from hsformat.target.checkpoint import Checkpoint, read_checkpoint
from hsformat.target.checkpoint import weights_digest as hash_weights
from hsformat.target.config import ModelConfig, normalise, read_config, unknown_family_problem
from hsformat.target.families import WITHOUT_CAP
from hsformat.target.jsonfiles import corrupt, require_folder
from hsformat.target.keytensors import KeyTensors, Role, basis_digest, find_key_tensors, shape_problems
from hsformat.target.tokenizer import chat_template, tokenizer_digest

__all__ = ["MEASURED", "NORM_WEIGHT", "TargetDescription", "UnknownFamily", "describe", "run_dtype"]

T = TypeVar("T")

MEASURED = ("final_norm", "embedding_scale", "head_scale", "softcap")
"""Facts that no config states; of a family outside the table they must be measured."""

NORM_WEIGHT = "final_norm_weight"
"""Given beside :data:`MEASURED` as False where the final norm has no weight (OLMo); otherwise one must be there."""


class UnknownFamily(ForeignFileError):
    """HS410 alone: the family is not in the table, nothing was measured, and all else in the folder can be used."""

    @property
    def model_type(self) -> str:
        """As the config names it."""
        return self.problems[0].got


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDescription:
    """What a model folder says.

    Attributes
    ----------
    model
        The target as a contract holds it.
    tokenizer_digest
        See :func:`hsformat.target.tokenizer.tokenizer_digest`.
    template, template_digest
        The chat template and the digest of its UTF-8 text; None: there is none.
    config
        The normalised config, over which ``model.config_digest`` is.
    max_positions
        ``max_position_embeddings``; None: the config has none.
    """

    model: TargetModel
    tokenizer_digest: str
    template: str | None
    template_digest: str | None
    config: dict[str, Any]
    max_positions: int | None


def describe(
    folder: str | Path,
    *,
    dtype: str | None = None,
    weights_digest: bool = False,
    measured: Mapping[str, Any] | None = None,
) -> TargetDescription:
    """Read a model folder: config, key tensors, tokenizer and template.

    Parameters
    ----------
    folder
        A folder as Transformers writes it, with safetensors.
    dtype
        The dtype in which the target runs; None: the config's.
    weights_digest
        Hash every byte of the weights (minutes for a large model). The key tensors are always hashed.
    measured
        For a ``model_type`` outside the table: ``final_norm`` (``{"kind", "eps", "unit_offset"}``),
        ``embedding_scale``, ``head_scale`` and ``softcap`` (None: no cap), found by running the model. Of a known
        family they must agree with the table. ``final_norm_weight``: see :data:`NORM_WEIGHT`.

    Notes
    -----
    Of a family outside the table only this is known beside what is measured: sizes, dtype, tying and biases as config
    and checkpoint have them, and ``rope`` from keys of the usual names. There

    - ``rope`` is empty where the config has no such key. This does not say that the model rotates nothing (GPT-J has
      ``rotary_dim``); what it does is then in the config digest alone;
    - the base must be stated (HS603), while a missing ``partial_rotary_factor`` means that all of a head is rotated,
      which a class may do otherwise without its config saying so;
    - ``rope`` applies to ``all`` layers, unless the config has parameters for each layer type;
    - what a config leaves out is not filled in, so that the files of two versions of Transformers may give two config
      digests.

    Raises
    ------
    UnknownFamily
        HS410 is all that is wrong: pass ``measured``.
    ForeignFileError
        All problems of the folder: HS301 (measured and table disagree), HS409, HS410, HS411, HS412, HS601, HS602,
        HS603.
    """
    path = Path(folder)
    require_folder(path)
    problems: list[Problem] = []
    config = _attempt(lambda: read_config(path), problems)
    tokenizer = _attempt(lambda: tokenizer_digest(path), problems)
    template = _attempt(lambda: chat_template(path), problems)
    checkpoint = _attempt(lambda: read_checkpoint(path), problems)
    if config is None:
        raise ForeignFileError(problems)
    unmeasured = config.family is None and measured is None
    norm_weight = None if unmeasured else (measured or {}).get(NORM_WEIGHT, True)
    quantization = _quantization(config, problems)
    runs_in = run_dtype(config, dtype, problems)
    facts = _facts(config, measured, problems)
    normalised, ropes = normalise(config, problems=problems)
    config_digest = _attempt(lambda: _config_digest(config, normalised), problems)
    tensors: KeyTensors = {}
    basis = None
    if checkpoint:
        tensors, basis = _key_tensors(config, checkpoint, norm_weight=norm_weight, problems=problems)
    if unmeasured:
        unknown = unknown_family_problem(config.path, config.model_type)
        raise ForeignFileError([unknown, *problems]) if problems else UnknownFamily(unknown)
    if problems or not (facts and tokenizer and checkpoint and config_digest and basis):
        raise ForeignFileError(problems)
    name, revision = _name(path)
    lm_head = tensors["lm_head"]
    model = TargetModel(
        name=name,
        revision=revision,
        architecture=config.architecture,
        num_layers=config.values["num_hidden_layers"],
        hidden_size=config.values["hidden_size"],
        vocab_size=config.values["vocab_size"],
        dtype=runs_in,
        quantization=quantization,
        embedding=Embedding(scale=facts["embedding_scale"], tied=config.tied),
        head=Head(
            bias=tensors["lm_head_bias"] is not None,
            softcap=facts["softcap"],
            scale=facts["head_scale"],
            padded_vocab=lm_head.shape[0] if lm_head else config.values["vocab_size"],
        ),
        final_norm=facts["final_norm"],
        rope=ropes,
        config_digest=config_digest,
        basis_digest=basis,
        weights_digest=hash_weights(checkpoint) if weights_digest else None,
    )
    positions = config.get("max_position_embeddings")
    return TargetDescription(
        model=model,
        tokenizer_digest=tokenizer,
        template=template,
        template_digest=None if template is None else digest_bytes((template.encode(),)),
        config=normalised,
        max_positions=positions if type(positions) is int else None,
    )


def _attempt(call: Callable[[], T], problems: list[Problem]) -> T | None:
    """Return what ``call`` returns, or None with its problems added: one broken part must not hide another."""
    try:
        return call()
    except ForeignFileError as e:
        problems += e.problems
        return None


def _config_digest(config: ModelConfig, normalised: Mapping[str, Any]) -> str:
    try:
        return digest_json(normalised)
    except ValueError as e:
        raise corrupt(str(config.path), e, "text and numbers that canonical JSON (RFC 8785) can write") from e


def _key_tensors(
    config: ModelConfig, checkpoint: Checkpoint, *, norm_weight: bool | None, problems: list[Problem]
) -> tuple[KeyTensors, str | None]:
    """Return the key tensors and the basis digest; None: something is wrong with them."""
    found: list[Problem] = []
    tensors = find_key_tensors(checkpoint, tied=config.tied, norm_weight=norm_weight, problems=found)
    sizes = {key: config.values[key] for key in ("hidden_size", "vocab_size")}
    found += [*shape_problems(tensors, **sizes), *_bias_problems(config, tensors)]
    problems += found
    if found:
        return tensors, None
    basis, same = basis_digest(tensors)
    if config.tied and not same:
        problems.append(
            problem(
                "HS412", where=f"{checkpoint.folder}: lm_head",
                got="it differs from the embedding and tie_word_embeddings is true",
                expected="one matrix, or tie_word_embeddings false",
                fix="set tie_word_embeddings to false if the stored lm_head is meant: engines differ in which they use",
            )
        )  # fmt: skip
    return tensors, basis


def _facts(config: ModelConfig, measured: Mapping[str, Any] | None, problems: list[Problem]) -> dict[str, Any] | None:
    """Return final norm, scales and cap: of the table, of ``measured``, or of both when they agree."""
    known = _table_facts(config, problems) if config.family else None
    if measured is None:
        return known
    if set(measured) - {NORM_WEIGHT} != set(MEASURED) or not isinstance(measured.get(NORM_WEIGHT, True), bool):
        got, expected = ", ".join(sorted(measured)) or "nothing", ", ".join(MEASURED)
        fix = "measure each of them; none has a default"
        problems.append(problem("HS410", where="measured", got=got, expected=expected, fix=fix))
        return None
    try:
        facts = {**measured, "final_norm": FinalNorm.model_validate(measured["final_norm"])}
        Embedding(scale=facts["embedding_scale"], tied=False)
        Head(bias=False, softcap=facts["softcap"], scale=facts["head_scale"], padded_vocab=1)
    except ValidationError as e:
        for error in e.errors(include_url=False):
            where = "measured: " + ".".join(map(str, error["loc"]))
            problems.append(problem("HS410", where=where, got=repr(error["input"]), expected=error["msg"]))
        return None
    for key in MEASURED if known else ():
        if known and facts[key] != known[key]:
            fix = "find out which is wrong before anything is extracted"
            where = f"{config.path}: {key}"
            problems.append(
                problem("HS301", where=where, got=f"measured {facts[key]}", expected=f"{known[key]}", fix=fix)
            )
    return facts


def _table_facts(config: ModelConfig, problems: list[Problem]) -> dict[str, Any] | None:
    family = config.family
    if family is None:
        return None
    before = len(problems)

    def value(key: str | None) -> float:
        """Return the number that a row's expression stands for."""
        if key is None:
            return 1.0
        if key == "sqrt(hidden_size)":
            return math.sqrt(config.values["hidden_size"])
        got = config.get(key.removeprefix("1/"))
        if isinstance(got, bool) or not isinstance(got, (int, float)) or not 1e-30 < got < 1e30:
            where = f"{config.path}: {key.removeprefix('1/')}"
            shown = "no such field" if got is None else repr(got)[:100]
            problems.append(problem("HS603", where=where, got=shown, expected="a number above 0"))
            return 1.0
        return 1 / got if key.startswith("1/") else float(got)

    eps = value(family.eps_key)
    no_cap = family.softcap is None or config.get(family.softcap) is None
    if config.wrapper in WITHOUT_CAP and not no_cap:
        fix = "the wrapper and its text model give different logits; use the text model"
        where = f"{config.path}: {family.softcap}"
        problems.append(problem("HS410", where=where, got=config.get(str(family.softcap)), expected="null", fix=fix))
    facts = {
        "final_norm": FinalNorm(kind=family.norm, eps=eps, unit_offset=family.unit_offset),
        "embedding_scale": value(family.embedding_scale),
        "head_scale": value(family.head_scale),
        "softcap": None if no_cap else value(family.softcap),
    }
    return facts if len(problems) == before else None


def _bias_problems(config: ModelConfig, tensors: KeyTensors) -> Iterator[Problem]:
    """Yield where the biases of final norm and head are not those of the family."""
    if config.family is None:
        return
    biases: dict[Role, bool] = {"final_norm_bias": config.family.norm_bias, "lm_head_bias": config.family.head_bias}
    words = {True: "a bias", False: "no bias"}
    for role, wanted in biases.items():
        there = tensors[role] is not None
        if there != wanted:
            where = f"{config.path.parent}: {role}"
            fix = f"{config.model_type} has {words[wanted]} there: get the complete checkpoint, or correct model_type"
            yield problem("HS411", where=where, got=words[there], expected=words[wanted], fix=fix)


def _quantization(config: ModelConfig, problems: list[Problem]) -> str | None:
    settings = config.values.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if isinstance(method, str) and method:
        return method
    fix = "name the method as its tool does (fp8, gptq, awq, compressed-tensors, ...)"
    where = f"{config.path}: quantization_config"
    problems.append(problem("HS603", where=where, got="no quant_method", expected="quant_method", fix=fix))
    return None


def run_dtype(config: ModelConfig, dtype: str | None, problems: list[Problem]) -> StateDtype:
    """Return the dtype in which the target runs: as given, or its config's; HS603 is added where that is none."""
    name = config.dtype if dtype is None else dtype
    for known in get_args(StateDtype):
        if name == known:
            return known  # type: ignore[no-any-return]  # get_args is untyped
    problems.append(
        problem(
            "HS603", where=f"{config.path}: dtype" if dtype is None else "dtype", got=name or "no dtype or torch_dtype",
            expected=f"one of {', '.join(get_args(StateDtype))}", fix="say in which dtype the target runs",
        )
    )  # fmt: skip
    return "float32"


def _name(path: Path) -> tuple[str, str | None]:
    """Return name and revision for people: of a hub cache's snapshot the model's, otherwise the folder's."""
    path = path.resolve()
    owner = path.parent.parent.name
    if path.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/"), path.name
    return path.name or str(path), None
