"""Where a loader is in its epochs, as JSON-able data that a checkpoint holds: written, and read without belief."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hsformat.torch.plan import Batching

__all__ = ["Position", "require_integers"]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Behind how many batches of which epoch, on each rank, and of which plan.

    Attributes
    ----------
    epoch, batches
        From 0.
    batching
        The parameters of :class:`hsformat.torch.plan.Batching`, by name.
    plan
        Checksum of the ids and of the batches of the epoch.
    """

    epoch: int
    batches: int
    batching: Mapping[str, Any]
    plan: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            A field is missing or is not what it must be; it is named.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"the state is {state!r}, and must be what state_dict() returned")
        if (version := state.get("version")) != _VERSION:
            raise ValueError(f"the state is of version {version!r}; this hsformat reads version {_VERSION}")
        missing = [name for name in cls.__dataclass_fields__ if name not in state]
        if missing:
            raise ValueError(f"the state has no {missing[0]!r}: it is not whole")
        require_integers(0, of="the state's ", epoch=state["epoch"], batches=state["batches"])
        for name, kind in {"batching": Mapping, "plan": str}.items():
            if not isinstance(state[name], kind):
                raise ValueError(f"the state's {name} is {state[name]!r}, and not what state_dict() returned")
        return cls(**{name: state[name] for name in cls.__dataclass_fields__})

    def differences(self, batching: Batching) -> list[str]:
        """Return what is said of each parameter in which a loader's batches are others."""
        was = {name: repr(value) for name, value in self.batching.items()}
        ours = {name: repr(value) for name, value in asdict(batching).items()}
        return [f"{k} was {was.get(k, 'not stated')} and is {v}" for k, v in ours.items() if was.get(k) != v]


def require_integers(least: int, *, of: str = "", **values: object) -> None:
    """Raise a ValueError that names the first value which is no integer of at least ``least``."""
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{of}{name} is {value!r}, and must be an integer of at least {least}")
