"""What one rank tells the others when the ranks of a watched loop meet: plain data.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpcheck.evidence import DdpStepEvidence, LoopEvent, ModuleDescription, PathEnd, Unregistered


def is_look(number: int) -> bool:
    """Whether a round is looked at thoroughly: 0 and the powers of two."""
    return number & (number - 1) == 0


@dataclass(frozen=True, slots=True)
class Account:
    """What one rank has seen since the ranks last met.

    Attributes:
        rank: The rank.
        step: The synchronised backward pass in which they meet, counted from 0.
        absences: By step, the parameters that did not contribute in it.
        never: Those that have contributed in no step so far.
        sometimes: Those that have been missing in some step so far.
        ends: Why parameters are missing.
        lost: Parameters that backward reached and gave nothing, with the Functions that may have been it.
        zero: Those whose gradient was exactly zero whenever it was looked at, though parameters have moved since.
        unregistered: Leaves that receive gradient and are no parameters.
        arrivals: How often a gradient arrived, where that was more than once.
        reentrant: Whether a re-entrant checkpoint stood in the graph.
        output_type: The class of what forward returned where DDP finds no tensor in it, else empty.
        changes: What has happened to parameters since they were wrapped, in a word.
        events: Of the loop, where they tell of something.
    """

    rank: int
    step: int
    absences: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    never: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()
    ends: Mapping[str, PathEnd] = field(default_factory=dict)
    lost: Mapping[str, PathEnd] = field(default_factory=dict)
    zero: tuple[str, ...] = ()
    unregistered: tuple[Unregistered, ...] = ()
    arrivals: Mapping[str, int] = field(default_factory=dict)
    reentrant: bool = False
    output_type: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    events: tuple[LoopEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Stock:
    """What one rank holds when the ranks compare themselves.

    Attributes:
        description: Of the module.
        values: Gradients, parameters and buffers as fingerprints, and gradients against the ranks' own average.
    """

    description: ModuleDescription
    values: DdpStepEvidence

    @property
    def is_bad(self) -> bool:
        """Whether this rank has something to tell by itself."""
        return any(difference.bad for difference in self.values.against_local)
