"""Evidence on what a script evaluates beside its training: copies of wrapped modules, and what it loads.

Judged in `judge.replicas.script_states`; gathered in `record.replicas.state_uses` and `record.replicas.state_loads`.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from ddpcheck.findings.report import Location


class StateUsed(Struct, frozen=True):
    """A module with parameters like those of a wrapped one is called in evaluation, or without gradients.

    Attributes:
        step: How often optimizers had stepped before.
        name: The variable in which the program holds it, else its class.
        lines: The lines of the program that call it, innermost first.
        digest: Of the values of its parameters.
        wrapped: Whether it is a wrapped module itself.
        loaded: Whether a state has been loaded into it since the last optimizer step.
        location: The line that loads it, else that assigns the variable.
    """

    step: int
    name: str
    lines: tuple[str, ...]
    digest: int
    wrapped: bool
    loaded: bool
    location: Location | None


class NothingLoaded(Struct, frozen=True):
    """A state was loaded with strict=False, and an optimizer steps, though no key of the state was one of the module's.

    Attributes:
        name: The class of the module.
        location: The line that loads it.
        prefix: What the keys of one of the two begin with, which apart from that fit.
        of_state: Whether that is the state, and not the module.
        keys: Of the module.
    """

    name: str
    location: Location | None
    prefix: str
    of_state: bool
    keys: int


def digest_of_values(fingerprints: Iterable[int]) -> int:
    """One number for the fingerprints of the tensors of a module, the same in every process."""
    return hash(tuple(sorted(fingerprints)))
