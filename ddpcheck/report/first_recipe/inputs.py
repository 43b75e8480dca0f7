"""The inputs of a model's forward, as plain data, and as the lines of Python that make them.

This module is light: it never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of forward.

    Attributes:
        name: Of forward's parameter.
        shape: Of one sample.
        high: Whole numbers below this one; None for normal random numbers.
    """

    name: str
    shape: tuple[int, ...]
    high: int | None = None

    @property
    def code(self) -> str:
        """Makes it, from SAMPLES and generator."""
        sizes = ", ".join(["SAMPLES", *map(str, self.shape)])
        if self.high is None:
            return f"torch.randn({sizes}, generator=generator)"
        shape = f"({sizes})" if self.shape else "(SAMPLES,)"
        return f"torch.randint({self.high}, {shape}, generator=generator)"


Output = Literal["tensor", "scalar", "sequence", "mapping"]
"""What forward returns: a tensor with samples in dim 0, a tensor without dimensions, or several tensors."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Inputs that forward accepts, and what it made of them."""

    inputs: tuple[Input, ...]
    output: Output


@dataclass(frozen=True, slots=True)
class NoGuess:
    """Nothing that was tried works.

    Attributes:
        names: Of the arguments of forward.
        tried: How many inputs were tried.
        error: What forward said of the first.
    """

    names: tuple[str, ...]
    tried: int
    error: str
