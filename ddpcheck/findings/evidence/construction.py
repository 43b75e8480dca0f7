"""Evidence on the construction of wrappers in a script: what each rank was about to hand to DDP.

Judged in `judge.replicas.wrapper_construction`; gathered in `record.rank.construction_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.report import Location


class SizedVariable(Struct, frozen=True):
    """A variable of the script that counts: a number, or a container of so many items.

    Attributes:
        name: With the attributes that lead to it ("data.classes").
        kind: Its class.
        size: The number, or how many items it has.
        location: The line that its function has come to.
    """

    name: str
    kind: str
    size: int
    location: Location


class WrapperBegun(Struct, frozen=True):
    """The constructor of a `DistributedDataParallel` has been called, and has not communicated yet.

    Attributes:
        module: The class of what it wraps.
        ranks: Of its process group.
        description: Of what it wraps, without what the wrapper is told to ignore.
        options: Of the wrapper, in words.
        location: The line of the script.
        lines: By name of a module, parameter or buffer, the line that registered it; of one that is registered at
            another line than what holds it.
        from_sets: The modules whose children stand as this process goes through a set of their names.
        sizes: Variables that may be what a size in the module was computed from.
    """

    module: str
    ranks: tuple[int, ...]
    description: ModuleDescription
    options: Mapping[str, str] = field(default_factory=dict)
    location: Location | None = None
    lines: Mapping[str, Location] = field(default_factory=dict)
    from_sets: tuple[str, ...] = ()
    sizes: tuple[SizedVariable, ...] = ()
