"""How ddpcheck speaks of ranks, steps and names, and which ranks it calls the odd ones.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0 and 2", "ranks 0 to 5"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def minority_ranks(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks whose value is not the most common one (of equally common ones: not the one seen first)."""
    common = Counter(values).most_common(1)[0][0]
    return tuple(rank for rank, value in enumerate(values) if value != common)


def format_steps(steps: Sequence[int]) -> str:
    """Steps in words: "step 1", "steps 0 and 2"."""
    return format_ranks(steps).replace("rank", "step")


def join_names(names: Sequence[str], *, most: int = 3) -> str:
    """Names in a sentence, shortened."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def group_by_value(values: Sequence[Any], say: Callable[[Any], str] = str) -> tuple[str, ...]:
    """The values of all ranks, equal ones together: "rank 0: a", "ranks 1 and 2: b"."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(say(value), []).append(rank)
    return tuple(f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items())


def counted(number: int, noun: str) -> str:
    """A number of things in words: "1 step", "3 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plural_verb(of_one: str, of_several: str, subjects: Sequence[object]) -> str:
    """The form of a verb that goes with so many subjects."""
    return of_one if len(subjects) == 1 else of_several


def capitalized(text: str) -> str:
    """`text` with a capital first letter, and the rest as it is."""
    return text[:1].upper() + text[1:]


def unless_all(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Ranks or steps as a finding names them: none where they are all of `count`."""
    return tuple(numbers) if len(numbers) < count else ()


@dataclass(frozen=True, slots=True)
class Names:
    """How to speak of parameters: all names of tied ones, and the lines that made them."""

    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    locations: Mapping[str, Location] = field(default_factory=dict)

    def subjects(self, names: Iterable[str]) -> tuple[str, ...]:
        """`names` with the other names of tied parameters, sorted as registered."""
        return tuple(dict.fromkeys(alias for name in names for alias in self.aliases.get(name, (name,))))

    def location(self, names: Sequence[str]) -> Location | None:
        """The line that made the first of `names`."""
        return next((self.locations[name] for name in names if name in self.locations), None)


def make_finding(
    code: str,
    subjects: Sequence[str],
    message: str,
    *,
    ranks: Sequence[int] = (),
    steps: Sequence[int] = (),
    location: Location | None = None,
    evidence: Sequence[str] = (),
    severity: Severity | None = None,
    fix: str = "",
    tags: tuple[str, ...] = (),
) -> Finding:
    """A finding with the severity and the advice (`fix`) of its rule, unless others are given."""
    return Finding(
        code=code,
        subjects=tuple(subjects),
        message=message,
        severity=severity or RULES[code].severity,
        ranks=tuple(ranks),
        steps=tuple(steps),
        location=location,
        evidence=tuple(evidence),
        fix=fix,
        tags=tags,
    )


def phrase(failure: RankFailure) -> str:
    """What happened to a rank, without its name."""
    return failure.message.removeprefix(f"rank {failure.rank} ")


_OF_SEVERAL = {"was": "were", "is": "are", "has": "have", "waits": "wait"}


def agreeing(phrase: str, ranks: Sequence[int]) -> str:
    """What happened to each of `ranks`, said of all of them: "was killed by SIGSEGV" becomes "were killed by ..."."""
    if len(ranks) == 1:
        return phrase
    plural_verb, space, rest = phrase.partition(" ")
    return _OF_SEVERAL.get(plural_verb, plural_verb) + space + rest.replace("before its work", "before their work")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 0`, `ranks 0 and 1`, `ranks 0, 2 and 3`, `ranks 0 to 7`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
