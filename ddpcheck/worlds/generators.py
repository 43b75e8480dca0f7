"""Read, compare and restore the states of the global random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any


def generators(*, thorough: bool) -> dict[str, Any]:
    """Return the states of torch's generators; `thorough` adds Python's and numpy's."""
    torch, numpy, states = sys.modules.get("torch"), sys.modules.get("numpy.random"), dict[str, Any]()
    if torch is not None and hasattr(torch, "get_rng_state"):  # False while torch is being imported
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
    if thorough:
        states["random"] = random.getstate()
        if numpy is not None:
            states["numpy"] = numpy.get_state()
    return states


def changed_since(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that differ from `before`, except the GPU's."""
    now = generators(thorough=True)
    return {name: now[name] for name in now if name != "cuda" and _spelled(now[name]) != _spelled(before.get(name))}


def _spelled(state: Any) -> str:
    return str(state.tolist() if hasattr(state, "tolist") else state)


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states returned by `generators`."""
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "cuda" in states:
        sys.modules["torch"].cuda.set_rng_state(states["cuda"])
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
