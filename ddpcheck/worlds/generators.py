"""The global generators of random numbers, as far as they are in use: read, compared and set. Imports none of them."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any


def generators(*, thorough: bool) -> dict[str, Any]:
    """The states of torch's global generators, to be set again; `thorough`: those of Python's and numpy's, too."""
    torch, numpy, found = sys.modules.get("torch"), sys.modules.get("numpy.random"), dict[str, Any]()
    if torch is not None and hasattr(torch, "get_rng_state"):  # not in the middle of its import
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
    if thorough:
        found["random"] = random.getstate()
        if numpy is not None:
            found["numpy"] = numpy.get_state()
    return found


def changed_since(before: Mapping[str, Any]) -> dict[str, Any]:
    """The states that are others than `before`, but for that of a GPU: something was seeded, drawn or imported."""
    now = generators(thorough=True)
    return {name: now[name] for name in now if name != "cuda" and _spelled(now[name]) != _spelled(before.get(name))}


def _spelled(state: Any) -> str:
    return str(state.tolist() if hasattr(state, "tolist") else state)


def set_generators(states: Mapping[str, Any]) -> None:
    """Have the global generators go on from such states."""
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "cuda" in states:
        sys.modules["torch"].cuda.set_rng_state(states["cuda"])
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
