"""Rules: one defect, one permanent code, one text that every output shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Severity(Enum):
    """The severity of a finding.

    `ERROR`: training is wrong, or will stop. `WARNING`: fragile, slow, or probably not meant. `NOTE`: worth knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)

    def reaches(self, threshold: Severity) -> bool:
        """Whether this severity is at or above `threshold`."""
        return self.rank <= threshold.rank


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


GRADIENTS = ("DDP301", "DDP302", "DDP303", "DDP304", "DDP305", "DDP312")
"""The rules on gradients that are not what they should be."""

When = Literal[
    "always",
    "an error",
    "same subjects",
    "only the loss",
    "made in forward",
    "its statistics",
    "by steps",
    "a note",
    "none is there",
    "of gradients",
]


@dataclass(frozen=True, slots=True)
class Explains:
    """What comes with a defect, and is no finding of its own beside it."""

    codes: tuple[str, ...]  # of the rules
    when: When = "always"  # in which cases (`judge.causes`)
    quietly: bool = False  # it goes without saying


@dataclass(frozen=True, slots=True)
class Rule:
    """One documented defect."""

    code: str  # permanent: never given to another defect, never renumbered
    name: str  # in kebab-case; may be used wherever the code may
    severity: Severity  # what a finding has unless its detector knows better
    summary: str  # one sentence: what is the case
    why: str  # what DDP makes of it, and where that is documented
    fix: str  # what to do, as a command
    detected: str  # what is compared or watched, and what makes a finding of it
    ignore: str  # when it is no defect
    reports: tuple[str, ...] = ()  # public threads on it, as OWNER/REPOSITORY#NUMBER
    example: str = ""  # a few lines of code that break the rule, with a comment on what would not
    explains: tuple[Explains, ...] = ()  # what is a consequence of it
    stops_ddp: bool = False  # whether the wrapper raises, hangs or aborts in the step
    takes_severity: bool = False  # whether a finding is as severe as the worst of its consequences
    spreads: bool = False  # whether a finding on more and more tensors is one defect
    # whether findings on the blocks of one list are one defect: experts, of which each step takes others
    by_family: bool = False


def compared_by_digest(what: str) -> str:
    """How it is detected that ranks have built their modules differently: by comparing `what` of them."""
    return (
        "Before DDP's first collective, each rank puts a digest of its module into the rendezvous store. If the "
        f"digests differ, the ranks exchange details and compare {what}"
    )


def address_of(report: str) -> str:
    """The address of a public thread, OWNER/REPOSITORY#NUMBER."""
    repository, _, number = report.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
