"""The flags of an SGLang server that gives hidden states: ``python -m hsformat_extractors.hosted.sglang_serve MODEL``.

It prints the command and starts nothing. Afterwards, on the same machine::

    hsformat extract --engine sglang --option server=http://127.0.0.1:30000 ...
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import sys
from pathlib import Path

from hsformat.layout import capture_key
from hsformat.problems import HsError
from hsformat.target import describe
from hsformat_extractors.hosted.options import SHARED, option_problems
from hsformat_extractors.hosted.sglang_args import engine_arguments, plan_captures, server_flags
from hsformat_extractors.hosted.wire import Launch
from hsformat_extractors.sglang import SglangExtractor

__all__ = ["command", "main"]


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
    options: dict[str, str] | None = None,
) -> list[str]:
    """Return the words that start the server.

    Parameters
    ----------
    layers
        Depths below the last, as in ``hsformat extract --layers``.
    last
        ``pre``, ``post``: the state after the last layer, before and after the final norm.
    staging
        A folder that the server and the extractor see under this name.

    Raises
    ------
    HsError
        The target cannot be described, or SGLang cannot give these captures.
    """
    given = options or {}
    known = {o.name: o for o in SHARED}
    if problems := [*option_problems(given, known, SglangExtractor.forbidden, SglangExtractor.name)]:
        raise HsError(problems)
    target = describe(model, dtype=dtype).model
    n = target.num_layers
    lasts = {"pre": capture_key(n), "post": capture_key(n, normed=True)}
    keys = [*map(capture_key, sorted(set(layers) - {n})), *(key for name, key in lasts.items() if name in last)]
    launch = Launch(
        model=str(model), architecture=target.architecture, num_layers=n, hidden_size=target.hidden_size,
        vocab_size=target.vocab_size, dtype=target.dtype, captures=tuple(keys), staging=str(staging),
        batch_tokens=batch_tokens, options=given,
    )  # fmt: skip
    plan = plan_captures(version, launch)
    arguments = engine_arguments(launch, plan, staging=str(staging), cpu=cpu)
    return ["python", "-m", "sglang.launch_server", *server_flags(arguments)]


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m hsformat_extractors.hosted.sglang_serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model", type=Path, help="folder of the target")
    parser.add_argument("--layers", required=True, help="depths: 2,15,27")
    parser.add_argument("--last", default="pre", help="pre, post, both or none")
    parser.add_argument("--staging", type=Path, required=True, help="folder for states, best on a disk of memory")
    parser.add_argument("--dtype", help="by default that of the target")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of one forward pass")
    parser.add_argument("--engine-version", help="by default that of the SGLang installed here")
    parser.add_argument("--engine-args", default="{}", help="further arguments, as a JSON object")
    parser.add_argument("--cpu", action="store_true", help="there is no accelerator")
    args = parser.parse_args(words)
    last = {"pre": ("pre",), "post": ("post",), "both": ("pre", "post"), "none": ()}.get(args.last)
    if last is None or not all(part.isdigit() for part in args.layers.split(",")):
        parser.error("--layers are numbers with commas between, --last is pre, post, both or none")
    try:
        found = command(
            args.model,
            layers=tuple(map(int, args.layers.split(","))),
            last=last,
            staging=args.staging,
            version=args.engine_version or importlib.metadata.version("sglang"),
            dtype=args.dtype,
            batch_tokens=args.batch_tokens,
            cpu=args.cpu,
            options={"engine_args": args.engine_args},
        )
    except HsError as e:
        print(e, file=sys.stderr)
        return 2
    except importlib.metadata.PackageNotFoundError:
        parser.error("SGLang is not installed here: name the server's --engine-version")
    print(shlex.join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
