"""Format ranks, steps and names, shorten texts, and make findings from rules."""

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
from ddpcheck.findings.rules import RULES, Severity

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

LONGEST_TRACEBACK = 10_000  # characters
_LONGEST = 2_000
_LONGEST_BY_FIELD = {"subjects": 500, "parameter": 500, "detail": 20_000}  # by field name


def suggests_names(what: str) -> Callable[[Function], Function]:
    """Decorate a public function (named `what`) to suggest names for misspelled keyword arguments."""

    def decorate(function: Function) -> Function:
        names = [*inspect.signature(function).parameters]

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in names and (close := difflib.get_close_matches(name, names, n=1)):
                    raise WrongTypeError(f"{what}: there is no {name!r}; did you mean {close[0]!r}?")
            return function(*arguments, **named)

        return cast(Function, call)

    return decorate


def shorten(text: str, most: int) -> str:
    """Return `text`, cut in the middle if longer than `most` characters."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    beginning = most * 2 // 3
    return f"{text[:beginning]} ... {left_out} characters left out ... {text[beginning - most :]}"


def shorten_texts(value: Value) -> Value:
    """Return a report, or part of a report, with overlong texts shortened."""
    return cast(Value, _map_texts(value, lambda text, name: shorten(text, _LONGEST_BY_FIELD.get(name, _LONGEST))))


def _map_texts(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """Return `value` with `change(text, field name)` applied to every text."""
    if isinstance(value, str):
        return value if isinstance(value, Enum) else change(value, name)
    if isinstance(value, tuple | list):
        return type(value)(_map_texts(item, change, name) for item in value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change, name): _map_texts(item, change, name) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        old_values = {attribute.name: getattr(value, attribute.name) for attribute in fields(value)}
        new_values = {key: _map_texts(item, change, key) for key, item in old_values.items()}
        changed = {key: item for key, item in new_values.items() if item != old_values[key]}
        return replace(value, **changed) if changed else value
    return value


_PREFIX = re.compile(r"\b_orig_mod\.|\._orig_mod\b| \(in module _orig_mod\)")


def plain_name(text: str) -> str:
    """Remove the `_orig_mod` prefix of `torch.compile` from names in a text."""
    return _PREFIX.sub("", text)


def without_prefix(finding: Finding) -> Finding:
    """Return the finding without the `_orig_mod` prefix of `torch.compile` in names."""
    change = {"module": plain_module}
    return cast(Finding, _map_texts(finding, lambda text, name: change.get(name, plain_name)(text)))


def plain_module(name: str) -> str:
    """Apply `plain_name` to a module name, which may be just `_orig_mod`."""
    return "" if name == "_orig_mod" else plain_name(name)


_FEWEST_IN_STEPS = 5
_MOST_PARTS = 12

_Args = ParamSpec("_Args")
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: "rank 1", "ranks 0 to 7 and 9".

    Ranks at equal distances: "ranks 3 to 1019 in steps of 8". Other long lists are cut to the first ranks and a count.
    """
    return _format_numbers("rank", ranks)


def format_steps(steps: Iterable[int]) -> str:
    """Format steps: "step 1", "steps 0 and 2"."""
    return _format_numbers("step", steps)


def _format_numbers(noun: str, numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    strides = {later - number for number, later in itertools.pairwise(ordered)}
    if len(ordered) >= _FEWEST_IN_STEPS and len(strides) == 1 and strides != {1}:
        return f"{noun}s {ordered[0]} to {ordered[-1]} in steps of {strides.pop()}"
    index = {number: i for i, number in enumerate(ordered)}
    runs = group_by(ordered, lambda number: number - index[number]).values()
    parts = [part for run in runs for part in ([run] if len(run) > 2 else [[number] for number in run])]
    words = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    if len(words) > _MOST_PARTS:
        num_left = sum(map(len, parts[_MOST_PARTS - 1 :]))
        words[_MOST_PARTS - 1 :] = [f"{num_left} more"]
    return f"{noun}{'' if len(ordered) == 1 else 's'} {join_names(words, most=len(words))}"


def minority_ranks(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value differs from the most common value (ties: first seen)."""
    common = Counter(values).most_common(1)[0][0]
    return tuple(rank for rank, value in enumerate(values) if value != common)


def minority_of_any(values: Iterable[Sequence[Hashable]]) -> list[int]:
    """Return the ranks that `minority_ranks` finds in any of the sequences."""
    return sorted({rank for values_by_rank in values for rank in minority_ranks(values_by_rank)})


def join_names(names: Sequence[str], *, most: int = 3) -> str:
    """Join names for a sentence, truncated to `most`."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def group_by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Group items by key, in order of first occurrence."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_by_value(values: Sequence[Any]) -> tuple[str, ...]:
    """Group ranks by equal values: "rank 0: a", "ranks 1 and 2: b"."""
    groups = group_by(range(len(values)), lambda rank: str(values[rank]))
    return tuple(f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items())


def format_by_rank(values: Mapping[str, Sequence[Any]]) -> list[str]:
    """Format values by name and rank: "lr: rank 0: 0.1; rank 1: 0.2"."""
    return [f"{name}: {'; '.join(group_by_value(by_rank))}" for name, by_rank in values.items()]


def plural(number: object, noun: str) -> str:
    """Format a count: "1 step", "3 steps", "2 passes", "2 batches"."""
    return f"{number} {noun}{'' if str(number) == '1' else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def suggestion(word: str, choices: Sequence[str], noun: str) -> str:
    """Suggest the closest choice for a misspelled `word`, or list all choices."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the {noun} are {', '.join(choices)}"


def plural_verb(of_one: str, of_several: str, subjects: Sequence[object]) -> str:
    """Return verb form `of_one` for a single subject, else `of_several`."""
    return of_one if len(subjects) == 1 else of_several


def capitalized(text: str) -> str:
    """Capitalize only the first letter of `text`."""
    return text[:1].upper() + text[1:]


def printable(text: str, but: str = "") -> str:
    """Escape unprintable characters as `repr` does, except characters in `but`."""
    return "".join(c if c.isprintable() or c in but else repr(c)[1:-1] for c in text)


def ranks_or_all(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the `numbers` of ranks or steps; return () if all `count` are affected."""
    return tuple(numbers) if len(numbers) < count else ()


PARAMETER_MADE = "parameter made"
"""Role of the line that makes the first parameter of a finding."""


@dataclass(frozen=True, slots=True)
class Names:
    """Parameter names for findings, with aliases of tied parameters and source lines."""

    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    locations: Mapping[str, Location] = field(default_factory=dict)

    def subjects(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return `names` with all aliases of tied parameters, without duplicates."""
        return tuple(dict.fromkeys(alias for name in names for alias in self.aliases.get(name, (name,))))

    def location(self, names: Sequence[str]) -> Location | None:
        """Return the line of the first parameter in `names` whose line is known."""
        return next((self.locations[name] for name in names if name in self.locations), None)

    def new_finding(
        self, code: str, names: Sequence[str], message: str, location: Location | None = None, **more: Any
    ) -> list[Finding]:
        """Return one finding on parameters; `location` defaults to the first parameter's line."""
        construction_line = self.location(names)
        related = {**more.pop("related", {}), PARAMETER_MADE: construction_line}
        return new_finding(
            code, self.subjects(names), message, location=location or construction_line, related=related, **more
        )


def format_position(finding: Finding) -> str:
    """Format line, ranks and steps: "at train.py:3, on rank 1, in step 2"."""
    line = f"at {finding.location}" if finding.location else ""
    ranks = f"on {format_ranks(finding.ranks)}" if finding.ranks else "on every rank"
    steps = f"in {format_steps(finding.steps)}" if finding.steps else ""
    return ", ".join(filter(None, (line, ranks, steps)))


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
    """Return a finding; severity defaults to the rule's, and empty evidence is dropped."""
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
        related=tuple(RelatedLocation(role, line) for role, line in related.items() if line not in (None, location)),
        path=path,
        tags=tags,
    )


def _returning_list(make: Callable[_Args, Finding]) -> Callable[_Args, list[Finding]]:
    return lambda *args, **kwargs: [make(*args, **kwargs)]


new_finding = _returning_list(make_finding)  # `make_finding` as a list, the return type of judges


def failure_text(failure: RankFailure) -> str:
    """Return the message of a failure without its "rank N" prefix."""
    return failure.message.removeprefix(f"rank {failure.rank} ")


_PLURAL_VERBS = {"was": "were", "is": "are", "has": "have", "waits": "wait"}


def pluralize_verb(phrase: str, ranks: Sequence[int]) -> str:
    """Put the verb of `phrase` in the plural for several ranks: "was" to "were"."""
    if len(ranks) == 1:
        return phrase
    verb, space, remainder = phrase.partition(" ")
    return _PLURAL_VERBS.get(verb, verb) + space + remainder.replace("before its work", "before their work")


def format_by_text(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Join (rank, text) pairs of equal text: "ranks 1 and 2 have ended"."""
    groups = {text: [rank for rank, _ in pairs] for text, pairs in group_by(texts, lambda pair: pair[1]).items()}
    return [f"{format_ranks(ranks)} {pluralize_verb(text, ranks)}" for text, ranks in groups.items()]
