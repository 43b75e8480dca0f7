"""Loaders and wrappers of a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Location
from ddpcheck.stream.entries import AttributesSet
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View


@dataclass(frozen=True, slots=True)
class TrainedWrapper:
    """A `DistributedDataParallel`, and attributes that the script sets on it."""

    module: str  # class of the wrapped module
    location: Location | None  # line that constructs the wrapper
    attributes: Sequence[str] = ()  # set on the wrapper before the end of its first step; the module has them too
    attributes_at: Location | None = None  # line that sets the first of them; `None` if unknown


@dataclass(frozen=True, slots=True)
class Training(View):
    """Loaders and wrappers of a script."""

    checks = ("loop",)
    world_size: int
    passes: Sequence[Sequence[LoaderPass]] = ()  # over data loaders, by rank, in order of time
    wrappers: Sequence[TrainedWrapper] = ()

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        wrappers = []
        for wrapper in facts.wrappers:
            entries = [entry for entries in wrapper.events(AttributesSet) for entry in entries]
            names = sorted({name for entry in entries for name in entry.names})
            line = next((entry.location for entry in entries if names[0] in entry.names), None)
            wrappers.append(TrainedWrapper(wrapper.made.module, wrapper.made.location, names, line))
        return cls(facts.world_size, facts.passes, wrappers)
