"""Rules: one defect, one permanent code, one text that every output shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal


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
        """Return True if the severity is at or above `threshold`."""
        return self.rank <= threshold.rank


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
    "of a cut file",
]


@dataclass(frozen=True, slots=True)
class Explains:
    """Consequence of a defect, not reported beside it."""

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


_FIELD = re.compile("^(why|fix|detected|ignore|explains|reports|example):", re.MULTILINE)


def rules(text: str) -> tuple[Rule, ...]:
    """Rules as the modules of this package spell them, one paragraph each.

    The first line has the code, the name, the severity and the flags that are set. After the summary come the other
    fields, each after its name: prose over several lines, then codes that it `explains` ("quietly" before them, "if"
    and the case after them, semicolons between), threads, and lines of code.
    """
    return tuple(_rule(*paragraph.split("\n", 1)) for paragraph in re.split(r"\n\n(?=DDP\d)", text.strip()))


def _rule(head: str, text: str) -> Rule:
    named, _, rest = head.partition(": ")
    (code, name), (severity, *flags) = named.split(), rest.split(", ")
    summary, *parts = _FIELD.split(text)
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    fields: dict[str, Any] = {field: " ".join(words.split()) for field, words in said.items()} | dict.fromkeys(
        flags, True
    )
    if "example" in said:
        fields["example"] = said["example"].strip("\n") + "\n"
    fields["reports"] = tuple(fields.get("reports", "").split())
    fields["explains"] = tuple(_explains(one) for one in fields.get("explains", "").split("; ") if one)
    return Rule(code, name, Severity(severity), " ".join(summary.split()), **fields)


def _explains(text: str) -> Explains:
    codes, _, when = text.partition(" if ")
    case: Any = when or "always"
    return Explains(tuple(codes.removeprefix("quietly ").split()), case, quietly=codes.startswith("quietly "))


def address_of(report: str) -> str:
    """The address of a public thread, OWNER/REPOSITORY#NUMBER."""
    repository, _, number = report.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
