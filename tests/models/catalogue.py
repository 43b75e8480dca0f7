"""All architectures, by key; `ddpcheck report tests.models.catalogue:bert` checks the one with the key `bert`."""

from __future__ import annotations

from ddpcheck import Recipe
from tests.models import other, text, vision
from tests.models.architecture import Architecture

CATALOGUE: dict[str, Architecture] = {**text.ROWS, **vision.ROWS, **other.ROWS}


def __getattr__(name: str) -> Recipe:
    if name in CATALOGUE:
        return CATALOGUE[name].recipe()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
