"""Drivers of the toy engine by name: ``toy_engine:Honest`` and those with a fault, from the modules that hold them."""

from __future__ import annotations

import toy_deaths
import toy_faults
import toy_llama


def __getattr__(name: str) -> type:
    for module in (toy_llama, toy_faults, toy_deaths):
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(name)
