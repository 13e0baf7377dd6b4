"""Whether data is that of a target model: 3xx and HS409, from the model's folder and without loading it.

May import ``compare``, ``contract`` and ``target``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hsformat.compare import compare
from hsformat.contract import Contract, TargetModel
from hsformat.problems import Problem, Severity, problem
from hsformat.target.checkpoint import read_checkpoint
from hsformat.target.describe import NORM_WEIGHT, TargetDescription, UnknownFamily, describe
from hsformat.target.keytensors import find_key_tensors

__all__ = ["check_target", "describe_target"]


def check_target(
    contract: Contract, templates: Mapping[str | None, int], described: TargetDescription, *, where: str
) -> list[Problem]:
    """Compare a store's contract and chat templates with a model folder.

    The config, the key tensors (embedding, final norm, head), the tokenizer and, where the contract has their digest,
    all weights are compared; name and revision are not.

    Parameters
    ----------
    templates
        Number of records by template digest; None: records without a template.
    described
        The folder, by :func:`describe_target`.
    where
        The store's place.

    Returns
    -------
    HS301 (target), HS302 (tokenizer), HS305 (quantisation), HS409 (hidden size), and HS303 (warning) for each other
    chat template.
    """
    own = contract.target
    same_name = described.model.model_copy(update={"name": own.name, "revision": own.revision})
    served = contract.model_copy(update={"target": same_name, "tokenizer_digest": described.tokenizer_digest})
    out = [p.at(where) for p in compare(contract, served) if p.severity is Severity.ERROR]
    for digest, records in templates.items():
        if digest is not None and digest != described.template_digest:
            out.append(
                problem(
                    "HS303",
                    where=f"{where}: {records} record(s)",
                    got=digest,
                    expected=described.template_digest or "no chat template",
                )
            )
    return out


def describe_target(contract: Contract | TargetModel, folder: str | os.PathLike[str]) -> TargetDescription:
    """Describe a model folder; of a family outside the table, the facts that were measured are taken from the contract.

    Parameters
    ----------
    contract
        Of the data, or its target alone.

    Raises
    ------
    ForeignFileError
        The folder cannot be read as a model.
    """
    target, path = contract.target if isinstance(contract, Contract) else contract, Path(folder)
    everything = target.weights_digest is not None
    try:
        return describe(path, dtype=target.dtype, weights_digest=everything)
    except UnknownFamily:
        tensors = find_key_tensors(read_checkpoint(path), tied=True, norm_weight=None, problems=[])
        measured = {
            "final_norm": target.final_norm.model_dump(),
            "embedding_scale": target.embedding.scale,
            "head_scale": target.head.scale,
            "softcap": target.head.softcap,
            # The contract does not say it, but the basis digest does: a weight too many or too few is HS301.
            NORM_WEIGHT: tensors["final_norm"] is not None,
        }
        return describe(path, dtype=target.dtype, weights_digest=everything, measured=measured)
