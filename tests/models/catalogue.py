"""All architectures, by key; `ddpcheck report tests.models.catalogue:bert` checks the one with the key `bert`.

`bert__sharded` is the same in another wrap (`tests.models.wraps`).
"""

from __future__ import annotations

from ddpcheck import Recipe
from tests.models import other, text, vision
from tests.models.architecture import Architecture
from tests.models.wraps import WRAPS

CATALOGUE: dict[str, Architecture] = {**text.ROWS, **vision.ROWS, **other.ROWS}


def __getattr__(name: str) -> Recipe:
    key, _, wrap = name.partition("__")
    if key in CATALOGUE and wrap in ("", *WRAPS):
        return CATALOGUE[key].recipe(wrap)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
