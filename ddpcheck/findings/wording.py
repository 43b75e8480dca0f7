"""Ranks, steps and names in words, texts of a length that a person reads, findings with the texts of their rules."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, ParamSpec, TypeVar, cast

from ddpcheck.findings.errors import RankFailure, WrongTypeError
from ddpcheck.findings.figures import ParameterPath
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, RelatedLocation
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.rules.rule import Severity

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

LONGEST_TRACEBACK = 10_000  # characters
_LONGEST = 2_000
_LONGEST_OF = {"subjects": 500, "parameter": 500, "detail": 20_000}  # by the name of the field


def suggests_names(what: str) -> Callable[[Function], Function]:
    """Have a function name the argument that an unknown one is like; Python says only that it is unknown."""

    def decorate(function: Function) -> Function:
        names = [*inspect.signature(function).parameters]

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in names and (near := difflib.get_close_matches(name, names, n=1)):
                    raise WrongTypeError(f"{what}: there is no {name!r}; did you mean {near[0]!r}?")
            return function(*arguments, **named)

        return cast(Function, call)

    return decorate


def shortened(text: str, most: int) -> str:
    """`text`; where it has more than `most` characters, its beginning and end, and how much is left out between."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    beginning = most * 2 // 3
    return f"{text[:beginning]} ... {left_out} characters left out ... {text[beginning - most :]}"


def limited(value: Value) -> Value:
    """A report, or anything that such is made of, with every text in it shortened."""
    made = _with_texts(value, lambda text, name: shortened(text, _LONGEST_OF.get(name, _LONGEST)))
    return cast(Value, made)


def _with_texts(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """A value with each text in it as `change` makes it of that and of the name of its field."""
    if isinstance(value, str):
        return value if isinstance(value, Enum) else change(value, name)
    if isinstance(value, tuple | list):
        return type(value)(_with_texts(item, change, name) for item in value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change, name): _with_texts(item, change, name) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        now = {one.name: getattr(value, one.name) for one in fields(value)}
        made = {key: _with_texts(item, change, key) for key, item in now.items()}
        changed = {key: item for key, item in made.items() if item != now[key]}
        return replace(value, **changed) if changed else value
    return value


_PREFIX = re.compile(r"\b_orig_mod\.|\._orig_mod\b| \(in module _orig_mod\)")


def plain_name(text: str) -> str:
    """A name of a parameter or module, or a text with some in it, without what `torch.compile` puts before them."""
    return _PREFIX.sub("", text)


def without_prefix(finding: Finding) -> Finding:
    """A finding whose names are those of the code as it is written: `torch.compile(module)` holds it as `_orig_mod`."""
    made: Finding = _with_texts(
        finding, lambda text, name: plain_module(text) if name == "module" else plain_name(text)
    )
    return made


def plain_module(name: str) -> str:
    """As `plain_name`, of a module, whose name may be nothing else."""
    return "" if name == "_orig_mod" else plain_name(name)


_FEWEST_IN_STEPS = 5
_MOST_PARTS = 12

_Given = ParamSpec("_Given")
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0 and 2", "ranks 0 to 7 and 9", "ranks 3 to 1019 in steps of 8".

    Of many that follow no such rule, the first ones and how many more there are.
    """
    return _format_numbers("rank", ranks)


def format_steps(steps: Iterable[int]) -> str:
    """Steps in words: "step 1", "steps 0 and 2"."""
    return _format_numbers("step", steps)


def _format_numbers(noun: str, numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    strides = {later - number for number, later in itertools.pairwise(ordered)}
    if len(ordered) >= _FEWEST_IN_STEPS and len(strides) == 1 and strides != {1}:
        return f"{noun}s {ordered[0]} to {ordered[-1]} in steps of {strides.pop()}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in ([run] if len(run) > 2 else [[number] for number in run])]
    words = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    if len(words) > _MOST_PARTS:
        left = sum(map(len, parts[_MOST_PARTS - 1 :]))
        words[_MOST_PARTS - 1 :] = [f"{left} more"]
    return f"{noun}{'' if len(ordered) == 1 else 's'} {join_names(words, most=len(words))}"


def minority_ranks(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks whose value is not the most common one (of equally common ones: not the one seen first)."""
    common = Counter(values).most_common(1)[0][0]
    return tuple(rank for rank, value in enumerate(values) if value != common)


def minority_of_any(values: Iterable[Sequence[Hashable]]) -> list[int]:
    """The ranks that are in the minority for any of several names (values by rank)."""
    return sorted({rank for of_name in values for rank in minority_ranks(of_name)})


def join_names(names: Sequence[str], *, most: int = 3) -> str:
    """Names in a sentence, shortened."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def group_by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Those with the same key together, in the order in which they come."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_by_value(values: Sequence[Any]) -> tuple[str, ...]:
    """The values of all ranks, equal ones together: "rank 0: a", "ranks 1 and 2: b"."""
    groups = group_by(range(len(values)), lambda rank: str(values[rank]))
    return tuple(f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items())


def told_by_rank(values: Mapping[str, Sequence[Any]]) -> list[str]:
    """Under each name the values of all ranks, as `group_by_value` tells them: "lr: rank 0: 0.1; rank 1: 0.2"."""
    return [f"{name}: {'; '.join(group_by_value(of_name))}" for name, of_name in values.items()]


def counted(number: object, noun: str) -> str:
    """A number of things in words: "1 step", "3 steps", "2 passes", "2 batches"."""
    return f"{number} {noun}{'' if str(number) == '1' else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def suggestion(word: str, choices: Sequence[str], noun: str) -> str:
    """What a misspelled `word` was probably meant to be, or what there is, in plural `noun`."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the {noun} are {', '.join(choices)}"


def plural_verb(of_one: str, of_several: str, subjects: Sequence[object]) -> str:
    """The form of a verb that goes with so many subjects."""
    return of_one if len(subjects) == 1 else of_several


def capitalized(text: str) -> str:
    """`text` with a capital first letter, and the rest as it is."""
    return text[:1].upper() + text[1:]


def printable(text: str, but: str = "") -> str:
    """`text`, with what cannot be printed written as Python escapes it, `but` for some characters."""
    return "".join(c if c.isprintable() or c in but else repr(c)[1:-1] for c in text)


def unless_all(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Ranks or steps as a finding names them: none where they are all of `count`."""
    return tuple(numbers) if len(numbers) < count else ()


PARAMETER_MADE = "parameter made"
"""Role of the line that makes the first parameter of a finding."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of parameters in findings: with all aliases of tied ones, and the lines that made them."""

    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    locations: Mapping[str, Location] = field(default_factory=dict)

    def subjects(self, names: Iterable[str]) -> tuple[str, ...]:
        """`names` with the other names of tied parameters, sorted as registered."""
        return tuple(dict.fromkeys(alias for name in names for alias in self.aliases.get(name, (name,))))

    def location(self, names: Sequence[str]) -> Location | None:
        """The line that made the first of `names`."""
        return next((self.locations[name] for name in names if name in self.locations), None)

    def one_finding(
        self, code: str, names: Sequence[str], message: str, location: Location | None = None, **more: Any
    ) -> list[Finding]:
        """A finding on parameters, with all their names, at the line that made the first if `location` is unknown."""
        made = self.location(names)
        related = {**more.pop("related", {}), PARAMETER_MADE: made}
        return one_finding(code, self.subjects(names), message, location=location or made, related=related, **more)


def format_place(finding: Finding) -> str:
    """Where and when: "at train.py:3, on rank 1, in step 2"."""
    place = [f"at {finding.location}"] if finding.location else []
    place.append(f"on {format_ranks(finding.ranks)}" if finding.ranks else "on every rank")
    if finding.steps:
        place.append(f"in {format_steps(finding.steps)}")
    return ", ".join(place)


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
    related: Mapping[str, Location | None] = types.MappingProxyType({}),
    path: ParameterPath | None = None,
    tags: tuple[str, ...] = (),
) -> Finding:
    """A finding with the severity and the advice (`fix`) of its rule, unless others are given; no evidence is empty."""
    return Finding(
        code=code,
        subjects=tuple(subjects),
        message=message,
        severity=severity or RULES[code].severity,
        ranks=tuple(ranks),
        steps=tuple(steps),
        location=location,
        evidence=tuple(filter(None, evidence)),
        fix=fix,
        related=tuple(RelatedLocation(role, at) for role, at in related.items() if at not in (None, location)),
        path=path,
        tags=tags,
    )


def _in_list(make: Callable[_Given, Finding]) -> Callable[_Given, list[Finding]]:
    return lambda *given, **named: [make(*given, **named)]


one_finding = _in_list(make_finding)  # `make_finding` in a list, as judges return what they find


def phrase(failure: RankFailure) -> str:
    """The message of a failure without the rank at its beginning."""
    return failure.message.removeprefix(f"rank {failure.rank} ")


_OF_SEVERAL = {"was": "were", "is": "are", "has": "have", "waits": "wait"}


def agreeing(phrase: str, ranks: Sequence[int]) -> str:
    """`phrase` with its verb in the plural where there are several ranks: "was killed by" becomes "were killed by"."""
    if len(ranks) == 1:
        return phrase
    verb, space, rest = phrase.partition(" ")
    return _OF_SEVERAL.get(verb, verb) + space + rest.replace("before its work", "before their work")


def told_together(said: Iterable[tuple[int, str]]) -> list[str]:
    """What each rank does, ranks that do the same together: "rank 0 waits in a", "ranks 1 and 2 have ended"."""
    groups = {text: [rank for rank, _ in same] for text, same in group_by(said, lambda one: one[1]).items()}
    return [f"{format_ranks(ranks)} {agreeing(text, ranks)}" for text, ranks in groups.items()]
