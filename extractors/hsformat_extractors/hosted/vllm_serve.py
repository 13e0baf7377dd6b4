r"""Print the command that starts a vLLM server which gives hidden states; start nothing.

For example::

    python -m hsformat_extractors.hosted.vllm_serve MODEL --captures d2,d15,d27,d30 --storage /mnt/hs \
        --vllm-version 0.32.0

Where vLLM is installed ``--vllm-version`` may be left out. What follows ``--`` is passed on to ``vllm serve``::

    python -m hsformat_extractors.hosted.vllm_serve MODEL --captures d2,d30n --storage /mnt/hs -- \
        --tensor-parallel-size 8 --data-parallel-size 2 --port 8000

``--cpu`` is for a machine without an accelerator, and taken for given where the vLLM installed here is built for one.
The server needs hsformat installed beside vLLM (its connector is loaded from it), and ``--storage`` is a folder on a
place that it and the extractor both see; make it first. Then, for the first command::

    hsformat extract --engine vllm --option server=http://HOST:8000 --option storage=/mnt/hs \
        --model MODEL --data chats.jsonl --out data.hs.zarr --layers 2,15,27 --last pre
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hsformat.engines.table import parse_version
from hsformat.problems import HsError, problem
from hsformat.target import describe
from hsformat_extractors.hosted.options import forbidden_problems
from hsformat_extractors.hosted.preflight import installed_version, version_problems
from hsformat_extractors.hosted.vllm_setup import CPU_ENVIRONMENT, speculation, transfer, wanted_slots
from hsformat_extractors.vllm import VllmExtractor

__all__ = ["main", "serve_command"]


def serve_command(
    model: Path, captures: Sequence[str], *, storage: str, version: str, dtype: str | None = None, cpu: bool = False
) -> list[str]:
    """Return the words of the command.

    Parameters
    ----------
    model
        The target's folder, as the server sees it as well. Here and in ``storage`` a relative path is below this
        process's folder.
    captures
        Keys, such as ``d2`` and ``d30n``.
    storage
        Folder for the files of states.
    version
        Of vLLM.
    dtype
        To run in; None: the config's.
    cpu
        There is no accelerator: nothing is compiled, which would take minutes and gain nothing; and the server is
        started as a module, since the word ``vllm`` of the CPU build asks for a distribution that this build is not.

    Raises
    ------
    HsError
        HS410: this vLLM is too old, or does not capture these depths of this architecture; HS304: what is no capture.
    ForeignFileError
        The folder is no target.
    """
    version, known = parse_version("vllm", version), VllmExtractor
    if found := [
        *version_problems(known.name, version, package=known.package, minimum=known.minimum, install=known.install)
    ]:
        raise HsError(found)
    target = describe(model, dtype=dtype).model
    slots = wanted_slots(captures, version=version, architecture=target.architecture, num_layers=target.num_layers)
    norm = target.final_norm.model_dump() if slots.normed else None
    started = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if cpu else ["vllm", "serve"]
    return [
        *started, str(model.absolute()), *(["--enforce-eager"] if cpu else []),
        "--dtype", target.dtype, "--skip-tokenizer-init", "--no-enable-prefix-caching", "--generation-config", "vllm",
        "--speculative-config", json.dumps(speculation(slots)),
        "--kv-transfer-config", json.dumps(transfer(slots, storage=str(Path(storage).absolute()), final_norm=norm)),
    ]  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    r"""Print the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the target")
    parser.add_argument("--captures", required=True, help="keys with commas: d2,d15,d27,d30 or d30n")
    parser.add_argument("--storage", required=True, help="folder that server and extractor see")
    parser.add_argument("--dtype", help="to run in; default: the config's")
    parser.add_argument("--vllm-version", help="of the server; default: what is installed here")
    parser.add_argument("--cpu", action="store_true", help="there is no accelerator; default: if the build is for none")
    given = list(sys.argv[1:] if words is None else words)
    cut = given.index("--") if "--" in given else len(given)
    args, further = parser.parse_args(given[:cut]), given[cut + 1 :]
    try:
        version = args.vllm_version or _installed()
        captures = [key.strip() for key in args.captures.split(",")]
        cpu = args.cpu or (args.vllm_version is None and _built_for_a_cpu())
        _refuse_forbidden(further)
        command = serve_command(args.model, captures, storage=args.storage, version=version, dtype=args.dtype, cpu=cpu)
    except HsError as e:
        print(e, file=sys.stderr)
        return 2
    environment = [f"{name}={value}" for name, value in CPU_ENVIRONMENT.items()] if cpu else []
    print(*environment, shlex.join([*command, *further]))
    folder = shlex.quote(str(Path(args.storage).absolute()))
    print(f"# Before it, on a place that server and extractor both see: mkdir -p {folder}", file=sys.stderr)
    return 0


_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "q": "quantization"}
"""Short names of arguments of ``vllm serve`` (0.32.0, engine/arg_utils.py)."""
_A_SERVER_S = {"tensor_parallel_size", "data_parallel_size", "max_num_batched_tokens"}
"""Arguments that have an option of their own in one process, and none here."""


def _refuse_forbidden(words: Sequence[str]) -> None:
    """Refuse further words of the command that the extractor forbids in ``engine_args``.

    Raises
    ------
    HsError
        HS410, one problem a word.
    """
    given: dict[str, Any] = {}
    for word, after in pairwise([*words, "--"]):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            name = _SHORT.get(name, name.replace("-", "_"))
            given[name] = value if equals else True if after.startswith("-") else after
    rules = [
        replace(rule, names=tuple(n for n in rule.names if n not in _A_SERVER_S)) for rule in VllmExtractor.forbidden
    ]
    if problems := [*forbidden_problems(given, rules, where="after --")]:
        raise HsError(problems)


def _installed() -> str:
    version = installed_version("vllm")
    if version is None:
        raise HsError(
            problem("HS410", where="--vllm-version", got="none, and vllm is not installed here", expected="a version",
                    fix=f"give the version of the server: --vllm-version {VllmExtractor.minimum}")
        )  # fmt: skip
    return version


def _built_for_a_cpu() -> bool:
    """Return whether the vLLM that is installed here is a build for CPUs, by its distribution's name or version.

    vLLM itself goes by the word ``cpu`` in its version (``platforms/__init__.py``); the driver in a process
    asks vLLM, which imports it.
    """
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return any("cpu" in f"{name} {importlib.metadata.version(name)}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
