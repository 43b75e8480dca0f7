"""Evidence on collectives.

Judged in `judge.collective_order`; gathered in `gather.collectives` and `gather.phases.repeated_step`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One collective that one rank entered.

    Attributes:
        operation: Its name in `torch.distributed`.
        group: Name of the process group.
        members: The ranks of the group.
        payload: Dtype and shape, and the root where there is one; empty where ranks may differ.
        place: What the rank was doing ("step 0: forward").
        location: The line of the user's code, as "path:line"; may be empty.
        elements: Of the floating-point tensor that goes in; what is logged usually has one.
        carries_gradient: Whether a tensor that requires grad went in.
        differentiable: Whether it was called by a custom autograd Function, which has a backward for it.
    """

    operation: str
    group: str
    members: tuple[int, ...]
    payload: str = ""
    place: str = ""
    location: str = ""
    elements: int = 0
    carries_gradient: bool = False
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.operation}({self.payload}){f' at {self.location}' if self.location else ''}"


@dataclass(frozen=True, slots=True)
class ReductionInput:
    """The input of one reduction when every rank had the same samples and random numbers.

    Attributes:
        operation: Its name.
        location: The line of the user's code, as "path:line"; may be empty.
        values: In memory order; empty where there were too many to compare.
    """

    operation: str
    location: str = ""
    values: tuple[float, ...] = ()
