"""What the extractor and an engine in another process say to each other: plain data and files, no pickled objects.

The extractor (``extractor``) runs in hsformat's process, which has no engine. A :class:`Driver` runs in a child process
(``host``), where an engine may die, hang or print whatever it likes. Both import this module and nothing of each other.

States travel as safetensors files in the staging folder, one a request, which the extractor deletes when it has read
them: a driver writes a file under another name and renames it, so that it is there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["TOKENS", "Answer", "Ask", "Driver", "Fault", "Launch"]

TOKENS = "token_ids"
"""Key of a staged file beside the captures' keys (``d2``, ``d30``, ``d30n``): [T] int64, what the engine ran."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What an engine is started for; the same for all requests.

    Attributes
    ----------
    model
        The target's folder.
    architecture, num_layers, hidden_size, vocab_size, dtype
        Of the target, as the contract says.
    captures
        Keys of the captures wanted, ascending (``hsformat.layout.capture_key``).
    staging
        A folder of this run alone, for the files of states.
    batch_tokens
        Bound of tokens in one forward pass.
    max_new_tokens
        The target writes at most so many tokens; 0: states of the tokens given.
    sampling
        ``temperature``, ``top_p``, ``top_k``, ``seed`` as in :class:`hsformat.record.Generation`; empty: greedy.
    stop_token_ids
        Tokens that end an answer, and are part of it.
    options
        Of this engine (``--option NAME=VALUE``), checked by ``preflight``.
    """

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    captures: tuple[str, ...]
    staging: str
    batch_tokens: int
    max_new_tokens: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request.

    Attributes
    ----------
    request
        An id of its own in this run, made of letters, digits and ``-``.
    prompt
        Token ids, at least one.
    max_new_tokens
        Fewer new tokens than the launch says, as for the short requests of the proof; None: as many as it says. A
        driver may take no notice where the launch says 0.
    seed
        Of this request alone, where the launch samples, so that an answer depends neither on its neighbours nor on
        the order of requests.
    """

    request: str
    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The engine is done with a request.

    Attributes
    ----------
    request
        Its id.
    tokens
        All tokens: the prompt as the engine has it, and what it wrote.
    file
        Name of the file in the staging folder; rows [S, H] a capture in the dtype that the engine computed in, S = T
        or, where the engine wrote tokens, T - 1: the last one is never run.
    next_token
        Where nothing is to be written, the token that an engine writes greedily all the same, and throws away: the
        proof compares it with the last capture. None: it is not told.
    """

    request: str
    tokens: tuple[int, ...]
    file: str
    next_token: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The engine gave no states for a request, and why; ``again``: another try may give them."""

    request: str
    message: str
    again: bool = False


class Driver(Protocol):
    """One engine, in the child process. Constructed without arguments; an exception of any method ends the child."""

    def start(self, launch: Launch) -> Mapping[str, Any]:
        """Load the target, or reach the server; return provenance as JSON data.

        ``versions``, ``device``, ``engine`` (arguments that it was started with) and ``max_tokens``, the longest
        sequence that it takes, answer included.
        """
        ...

    def run(self, asks: Sequence[Ask]) -> Iterator[Answer | Fault]:
        """Give the engine these requests together; yield exactly one answer or fault for each, as they come."""
        ...

    def stop(self) -> None:
        """End the engine. May be called twice."""
        ...
