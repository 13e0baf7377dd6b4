r"""Print the command that starts an SGLang server which gives hidden states; start nothing.

For example::

    python -m hsformat_extractors.hosted.sglang_serve MODEL --layers 2,15,27 --last pre --staging /dev/shm/hs \
        --engine-version 0.5.23

Where SGLang is installed ``--engine-version`` may be left out; ``--cpu``, for a machine without an accelerator, is then
taken for given where the torch installed here is built for one. ``--staging`` is a folder on a place that server and
extractor both see under one name; make it first. Then, for this command, on the same machine::

    hsformat extract --engine sglang --option server=http://127.0.0.1:30000 \
        --model MODEL --data chats.jsonl --out data.hs.zarr --layers 2,15,27 --last pre
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hsformat.extraction.plan import parse_layers
from hsformat.layout import capture_key
from hsformat.problems import HsError, Problem, problem
from hsformat.target import describe
from hsformat_extractors.hosted.options import SHARED, Forbidden, option_problems
from hsformat_extractors.hosted.options import engine_arguments as further_arguments
from hsformat_extractors.hosted.preflight import installed_version
from hsformat_extractors.hosted.sglang_args import engine_arguments, plan_captures, server_flags
from hsformat_extractors.hosted.wire import Launch
from hsformat_extractors.sglang import SglangExtractor

__all__ = ["command", "main"]

_LAST: dict[str, tuple[str, ...]] = {"pre": ("pre",), "post": ("post",), "both": ("pre", "post"), "none": ()}
_DEVICES = frozenset({"tp_size", "dp_size"})
_FORBIDDEN = (
    *(rule for rule in SglangExtractor.forbidden if not _DEVICES.intersection(rule.names)),
    Forbidden(names=("config",), why="nobody looks at the arguments in a file", fix="write them into --engine-args"),
)
"""What the extractor forbids, but for devices and replicas: it has options for them, a server has these arguments.

An argument of the command line alone is added."""


def command(
    model: Path,
    *,
    layers: tuple[int, ...],
    last: tuple[str, ...],
    staging: Path,
    version: str,
    dtype: str | None = None,
    batch_tokens: int = 8192,
    cpu: bool = False,
    sampled: bool = False,
    options: dict[str, str] | None = None,
) -> list[str]:
    """Return the words that start the server.

    Parameters
    ----------
    layers
        Depths, as in ``hsformat extract --layers``; depth N is before the final norm.
    last
        ``pre``, ``post``: the state after the last layer, before and after the final norm.
    staging
        A folder that the server and the extractor see under this name; a relative one is below this process's.
    batch_tokens
        Tokens of one forward pass.
    cpu
        There is no accelerator.
    sampled
        Answers will be drawn (``hsformat extract --temperature``), each by its own seed, which SGLang heeds with
        ``enable_deterministic_inference`` alone.
    options
        ``engine_args``: further arguments of SGLang, as a JSON object.

    Raises
    ------
    HsError
        HS410: this version of SGLang cannot give these captures, states would be lost under an option,
        ``batch_tokens`` is below 1, or ``sampled`` without an accelerator. HS304: the target has no such depth.
    ForeignFileError
        The folder is no target.
    """
    given = options or {}
    known = {o.name: o for o in SHARED}
    problems = [*option_problems(given, known, _FORBIDDEN, SglangExtractor.name)]
    problems = problems or [*_abbreviated(given)]
    if batch_tokens < 1:
        problems.append(
            problem("HS410", where="--batch-tokens", got=batch_tokens, expected="at least 1",
                    fix="give a number of tokens that fits the device, such as 4096")
        )  # fmt: skip
    if sampled and cpu:
        problems.append(
            problem("HS410", where="--sampled", got="no accelerator (--cpu, or torch is built for none)",
                    expected="an accelerator: without one SGLang heeds no seed",
                    fix="let it answer greedily, or use another engine on a CPU")
        )  # fmt: skip
    if problems:
        raise HsError(problems)
    target = describe(model, dtype=dtype).model
    n = target.num_layers
    lasts = {"pre": (n, False), "post": (n, True)}
    wanted = {*((depth, False) for depth in layers), *(lasts[name] for name in last)}
    keys = [capture_key(depth, normed=normed) for depth, normed in sorted(wanted)]
    folder = str(staging.absolute())
    launch = Launch(
        model=str(model.absolute()), architecture=target.architecture, num_layers=n, hidden_size=target.hidden_size,
        vocab_size=target.vocab_size, dtype=target.dtype, captures=tuple(keys), staging=folder,
        batch_tokens=batch_tokens, options=given, sampling={"seed": 0} if sampled else {},
    )  # fmt: skip
    plan = plan_captures(version, launch)
    arguments = engine_arguments(launch, plan, staging=folder, cpu=cpu)
    return ["python", "-m", "sglang.launch_server", *server_flags(arguments)]


def _abbreviated(options: Mapping[str, str]) -> Iterator[Problem]:
    """Yield HS410 for the beginning of a forbidden argument, which SGLang's command line takes for the whole of it."""
    forbidden = [name for rule in _FORBIDDEN for name in rule.names]
    for given in further_arguments(options):
        if given not in forbidden and (whole := [name for name in forbidden if name.startswith(given)]):
            yield problem("HS410", where=f"option engine_args: {given}", got=f"the beginning of {' and '.join(whole)}",
                          expected="whole names of arguments", fix="write the whole name, or leave it out")  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m hsformat_extractors.hosted.sglang_serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model", type=Path, help="folder of the target")
    parser.add_argument("--layers", required=True, help="eagle3, or depths: 2,15,27")
    parser.add_argument("--last", default="pre", choices=_LAST, help="depth N before or after the final norm")
    parser.add_argument("--staging", type=Path, required=True, help="folder for states, best on a disk of memory")
    parser.add_argument("--dtype", help="by default that of the target")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of one forward pass")
    parser.add_argument("--engine-version", help="by default that of the SGLang installed here")
    parser.add_argument("--engine-args", default="{}", help="further arguments, as a JSON object")
    parser.add_argument("--cpu", action="store_true", help="there is no accelerator; default: if torch is for none")
    parser.add_argument("--sampled", action="store_true", help="answers will be drawn: extract with --temperature")
    args = parser.parse_args(words)
    cpu = args.cpu or (args.engine_version is None and _built_for_a_cpu())
    try:
        found = command(
            args.model,
            layers=parse_layers(args.layers, describe(args.model, dtype=args.dtype).model.num_layers),
            last=_LAST[args.last],
            staging=args.staging,
            version=args.engine_version or _installed(),
            dtype=args.dtype,
            batch_tokens=args.batch_tokens,
            cpu=cpu,
            sampled=args.sampled,
            options={"engine_args": args.engine_args},
        )
    except HsError as e:
        print(e, file=sys.stderr)
        return 2
    # Without it SGLang looks for an accelerator (the driver of extraction sets it as well).
    print(("SGLANG_USE_CPU_ENGINE=1 " if cpu else "") + shlex.join(found))
    folder = shlex.quote(str(args.staging.absolute()))
    print(f"# Before it, on a place that server and extractor both see: mkdir -p {folder}", file=sys.stderr)
    return 0


def _installed() -> str:
    version = installed_version("sglang")
    if version is None:
        raise HsError(
            problem("HS410", where="--engine-version", got="none, and sglang is not installed here",
                    expected="a version",
                    fix=f"give the version of the server: --engine-version {SglangExtractor.minimum}")
        )  # fmt: skip
    return version


def _built_for_a_cpu() -> bool:
    """Return whether the torch that is installed here is a build for CPUs that nothing extends to an accelerator.

    Its version ends in ``+cpu`` then. SGLang's guide for Ascend installs such a build beside ``torch_npu``; what
    extends torch registers entry points of group ``torch.backends``, since torch 2.5. Other builds, such as those of a
    platform for which no index has another one, do not say what they are for. Neither torch nor SGLang is imported.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    extended = importlib.metadata.entry_points(group="torch.backends") or importlib.util.find_spec("torch_npu")
    return version.endswith("+cpu") and not extended


if __name__ == "__main__":
    sys.exit(main())
