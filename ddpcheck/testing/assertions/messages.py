"""Messages of assertions on reports, anomalous parameters and values of ranks.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.report import Finding, ParityEntry, Report, Severity, select_findings
from ddpcheck.findings.rules import RULES, is_selected
from ddpcheck.findings.wording import capitalized, format_ranks, group_by, plural, plural_verb

_REFERENCES = {  # check line -> (reference of the comparison, subject of the message if it was not made)
    "reducer": ("local", "DDP's gradients were not compared with the average of the ranks' own"),
    "parity": ("single-process", "the gradients were not compared with those of a single process"),
}
_MOST_ENTRIES = 5


def parity_failure_message(
    report: Report,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    tolerance: tuple[float, float] | None = None,
) -> str:
    """Return the failure message of `ddpcheck.assert_parity`, or '' if the gradients match.

    `tolerance` is (rtol, atol) and replaces the measured tolerances.
    """
    relevant = [finding for finding in report.findings if _is_relevant(finding)]
    selected = select_findings(relevant, select=select, ignore=ignore)
    wanted = {
        check: reference
        for check, (reference, _) in _REFERENCES.items()
        if any(is_selected(code, select, ignore) for code in _rules_on_gradients(check))
    }
    distances = [_distance(entry, tolerance) for entry in report.parity if entry.reference in wanted.values()]
    mismatched = [distance for distance in distances if not distance[0] <= distance[1]]
    if tolerance is not None and not mismatched:
        by_tolerance = {code for code, rule in RULES.items() if rule.gradients_differ and not rule.needs_average}
        selected = tuple(finding for finding in selected if finding.code not in by_tolerance)
    explained_codes = {finding.code for finding in relevant} if tolerance is None else set()
    unexplained = [] if explained_codes or selected else mismatched  # ignored findings count as an explanation
    withheld = [finding for finding in relevant if RULES[finding.code].undecided and finding not in selected]
    obstacles = [] if report.error is None else [report.error.message]
    obstacles += [sentence for check in wanted if report.error is None and (sentence := _why_skipped(check, report))]
    lines = [line for finding in (*selected, *withheld) for line in _finding_lines(finding)]
    if unexplained or (mismatched and tolerance is not None):
        lines += _mismatch_lines(mismatched, len(distances))
        lines += [f"  note: {note}" for note in report.world.get("notes", ()) if tolerance is None]
    if not obstacles and not lines:
        return ""
    rules = [RULES[finding.code] for finding in selected]
    differ = mismatched or any(rule.family == "gradients" and not rule.undecided for rule in rules)
    undecided = obstacles or any(RULES[finding.code].undecided for finding in relevant)
    title = "Gradients could not be compared!" if undecided and not differ else "Gradients are not close!"
    world = f"{report.world.get('world_size', '?')} ranks, {report.world.get('steps', '?')} steps"
    return "\n".join([title, "", f"{report.target}: {world}", *obstacles, *lines])


def _mismatch_lines(mismatched: Sequence[tuple[float, float, str]], count: int) -> list[str]:
    worst = sorted(mismatched, key=lambda distance: -distance[0] / (distance[1] or 1e-300))[:_MOST_ENTRIES]
    lines = [f"{len(mismatched)} of {count} comparisons of a gradient with its reference are beyond the tolerance:"]
    lines += [f"  {text}" for _, _, text in worst]
    return [*lines, f"  and {hidden} more"] if (hidden := len(mismatched) - _MOST_ENTRIES) > 0 else lines


def _distance(entry: ParityEntry, tolerance: tuple[float, float] | None) -> tuple[float, float, str]:
    """Return the gradient error, the allowed error, and both as text.

    If |g - r| <= atol + rtol * |r| for every element, then norm(g - r) is within the allowed error.
    """
    where = f"{entry.parameter} in step {entry.step}, against {entry.reference}"
    if tolerance is None:
        error, allowed = entry.relative_error, entry.tolerance
        return error, allowed, f"{where}: relative error {error:.2g}, allowed {allowed:.2g}"
    rtol, atol = tolerance
    error, allowed = entry.absolute_error, atol * math.sqrt(entry.elements) + rtol * entry.reference_norm
    terms = f"{atol:g} * sqrt({entry.elements}) + {rtol:g} * {entry.reference_norm:.4g}"
    return error, allowed, f"{where}: norm of the difference {error:.4g}, allowed {allowed:.4g} ({terms})"


def _rules_on_gradients(check: str) -> list[str]:
    """Return codes of rules on differing gradients that belong to the check line `check`."""
    return [code for code, rule in RULES.items() if rule.gradients_differ and rule.checks["report"][-1] == check]


def _is_relevant(finding: Finding) -> bool:
    codes = {finding.code, *finding.tags} & RULES.keys()  # tags name consequences
    return finding.severity is Severity.ERROR or any(RULES[code].family == "gradients" for code in codes)


def _why_skipped(check: str, report: Report) -> str:
    reference, subject = _REFERENCES[check]
    result = next((result for result in report.checks if result.name == check), None)
    is_skipped = result is not None and result.status == "skipped"
    if not is_skipped and any(entry.reference == reference for entry in report.parity):
        return ""
    return f"{subject}: {result.detail if result and result.detail else 'not reached'}"


def _finding_lines(finding: Finding) -> list[str]:
    where = f" (at {finding.location})" if finding.location else ""
    lines = [f"{finding.code} {', '.join(finding.subjects)}: {finding.message}{where}"]
    lines += [f"  {fact}" for fact in finding.evidence]
    return [*lines, f"  fix: {finding.what_to_do}"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Parameter without gradient, or unregistered tensor with a gradient."""

    name: str  # name of the parameter; a tied parameter has several, comma-separated
    shape: tuple[int, ...] = ()
    registered: bool = True  # registered as a parameter of the model
    location: str = ""  # "path:line" of its creation, or '' if unknown
    cause: str = ""  # why there is no gradient, or '' if unknown


def anomalies_message(by_rank: Mapping[int, Sequence[Anomaly]]) -> str:
    """Return the message on the anomalies of all ranks, or '' if none."""
    pairs = [(rank, anomaly) for rank, anomalies in by_rank.items() for anomaly in anomalies]
    ranks = {name: [rank for rank, _ in part] for name, part in group_by(pairs, lambda pair: pair[1].name).items()}
    by_name = {anomaly.name: anomaly for _, anomaly in reversed(pairs)}
    kinds = group_by(
        (by_name[name] for name in ranks),
        lambda anomaly: (not anomaly.registered, anomaly.registered and len(ranks[anomaly.name]) < len(by_rank)),
    )
    lines = ["Not every parameter contributes to the loss!"] if pairs else []
    for kind, group in sorted(kinds.items(), key=lambda item: item[0]):
        lines += ["", f"{len(group)} {plural_verb(*_ANOMALIES[kind], group)}:"]
        for anomaly in group:
            location = f", made at {anomaly.location}" if anomaly.location else ""
            on_ranks = f", {'not ' if anomaly.registered else ''}on {format_ranks(ranks[anomaly.name])}"
            on_ranks = on_ranks if len(ranks[anomaly.name]) < len(by_rank) else ""
            lines.append(f"  {anomaly.name} of shape {anomaly.shape}{on_ranks}{location}")
        lines += [f"  {cause}" for cause in dict.fromkeys(anomaly.cause for anomaly in group if anomaly.cause)]
    return "\n".join(lines)


_UNUSED = "from this loss (DDP101, DDP102 or DDP103: unused, left out of the loss or detached)"
_ON_SOME = "on some ranks only, on which DDP hangs (DDP104)"
_ANOMALIES = {  # (not a parameter of the model, on some ranks only) -> singular and plural
    (False, False): (f"parameter gets no gradient {_UNUSED}", f"parameters get no gradient {_UNUSED}"),
    (False, True): (f"parameter contributes {_ON_SOME}", f"parameters contribute {_ON_SOME}"),
    (True, False): (
        "tensor gets a gradient and is no parameter of the model, so DDP never synchronises it (DDP106)",
        "tensors get a gradient and are no parameters of the model, so DDP never synchronises them (DDP106)",
    ),
}

_MOST_ITEMS = 8  # maximum number of further mismatches listed
_MOST_GROUPS = 4  # maximum number of groups of ranks whose distances are listed
_NAN_ADVICE = "NaN does not equal NaN; pass equal_nan=True if NaN is expected."
_TITLES = {
    "tensor": "Tensor-likes",
    "number": "Scalars",
    "value": "Values",
}  # by kind of `ComparedItem`; as in torch.testing


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Comparison options; must be equal on all ranks."""

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = False
    check_device: bool = True
    check_stride: bool = False

    @property
    def exact(self) -> bool:
        return self.rtol == 0.0 and self.atol == 0.0


@dataclass(frozen=True, slots=True)
class ComparedItem:
    """Item of the compared value: a tensor, number, other plain value or container."""

    path: str  # Python expression relative to the argument, for example "[0].weight"; '' for the argument
    kind: str  # "tensor", "number", "value", or the kind of container
    value: Any = None  # number, repr of a plain value, or length of a container
    attributes: tuple[tuple[str, str], ...] = ()  # compared tensor attributes, such as shape and dtype
    fingerprint: int = 0  # of the values of a tensor
    nans: str = ""  # text with the number of NaNs and the first index, or '' if none

    @property
    def key(self) -> Hashable:
        """Comparison key; must be equal on all ranks."""
        return (self.kind, self.attributes, repr(self.value), self.fingerprint)  # repr distinguishes 1, 1.0 and True

    def __str__(self) -> str:
        if self.kind == "tensor":
            named = dict(self.attributes)
            return f"a tensor of shape {named['shape']} and dtype {named['dtype']}"
        return str(self.value) if self.kind in _TITLES else f"a {self.kind} of {plural(self.value, 'item')}"


@dataclass(frozen=True, slots=True)
class RankValues:
    """Items of the compared value on one rank."""

    options: CompareOptions
    entries: tuple[ComparedItem, ...] = ()
    location: str = ""  # "path:line" of the assertion
    error: str = ""  # why the items cannot be compared, or ''


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One item that differs between ranks."""

    path: str  # path of the item
    entries: Mapping[int, ComparedItem | None]  # by rank; `None` if missing on the rank
    reference: int  # first rank with the most common value
    differing_ranks: tuple[int, ...]  # ranks with a different value; empty if all have the same NaN
    # by rank: (maximum difference from the reference, text or '' if close); {} if not measured
    distances: Mapping[int, tuple[float, str]] = field(default_factory=dict)

    @property
    def measurable(self) -> bool:
        """True if only tensor values differ, so that distances can be computed."""
        kinds = {entry and (entry.kind, entry.attributes) for entry in self.entries.values()}
        return bool(self.differing_ranks) and len(kinds) == 1 and self.present[0].kind == "tensor"

    @property
    def present(self) -> list[ComparedItem]:
        return [entry for entry in self.entries.values() if entry is not None]

    @property
    def outlying_ranks(self) -> tuple[int, ...]:
        """Ranks that differ by more than the tolerance."""
        if not self.distances:
            return self.differing_ranks
        return tuple(rank for rank, (_, text) in self.distances.items() if text)


def usage_error(by_rank: Mapping[int, RankValues]) -> str:
    """Return why the values cannot be compared, or ''; identical on all ranks."""
    if error := first_error({rank: values.error for rank, values in by_rank.items()}):
        return error
    options = {rank: values.options for rank, values in by_rank.items()}
    if len({*options.values()}) == 1:
        return ""
    return f"the ranks compare in different ways: {_on_ranks(options)}; give the same options on every rank"


def first_error(errors: Mapping[int, str]) -> str:
    """Return the first error and, unless all ranks failed, the failed ranks in parentheses."""
    failed = [rank for rank, error in errors.items() if error]
    where = "" if len(failed) in (0, len(errors)) else f" ({format_ranks(failed)})"
    return f"{next(filter(None, errors.values()), '')}{where}"


def has_nothing_to_compare(values: RankValues) -> bool:
    """Return True if there is no tensor, number or text to compare."""
    return all(entry.value == "None" for entry in values.entries if entry.kind in _TITLES)


def differences(by_rank: Mapping[int, RankValues]) -> list[Mismatch]:
    """Return items that differ between ranks; for numbers, by more than the tolerance."""
    options = next(iter(by_rank.values())).options
    by_path = {rank: {entry.path: entry for entry in values.entries} for rank, values in by_rank.items()}
    mismatches = []
    for path in dict.fromkeys(path for entries in by_path.values() for path in entries):
        entries = {rank: rank_entries.get(path) for rank, rank_entries in by_path.items()}
        keys = {rank: entry and entry.key for rank, entry in entries.items()}
        common = Counter(keys.values()).most_common(1)[0][0]
        reference = next(rank for rank, key in keys.items() if key == common)
        odd = tuple(rank for rank, key in keys.items() if key != common)
        nans = not options.equal_nan and any(entry and entry.nans for entry in entries.values())
        if (odd or nans) and not _numbers_are_close(entries, reference, options):
            mismatches.append(Mismatch(path, entries, reference, odd))
    return mismatches


def _numbers_are_close(entries: Mapping[int, ComparedItem | None], reference: int, options: CompareOptions) -> bool:
    values = {rank: entry.value for rank, entry in entries.items() if entry and entry.kind == "number"}
    if len(values) < len(entries) or len({*map(type, values.values())}) > 1 or isinstance(values[reference], bool):
        return False
    want = values[reference]

    def is_close(got: Any) -> bool:
        if got == want or (options.equal_nan and got != got and want != want):
            return True
        distance = abs(got - want)
        return bool(distance <= options.atol + options.rtol * abs(want) and math.isfinite(distance))

    return all(map(is_close, values.values()))


def mismatch_message(mismatches: Iterable[Mismatch], by_rank: Mapping[int, RankValues], name: str = "") -> str:
    """Return the message on `mismatches` of argument `name`, or '' if within the tolerance."""
    failed = [item for item in mismatches if item.outlying_ranks or not item.distances]
    if not failed:
        return ""
    first, others = failed[0], failed[1:]
    lines = _detail_lines(first, "equal" if next(iter(by_rank.values())).options.exact else "close")
    if spelled_path := _spelled_path(first, name):
        lines += ["", f"The failure occurred for item {spelled_path}"]
    if others:
        lines.append(f"{len(others)} more {plural_verb('item is', 'items are', others)} not the same on all ranks:")
        lines += [f"  {_spelled_path(item, name)}: {_short_description(item)}" for item in others[:_MOST_ITEMS]]
        lines += [f"  and {len(others) - _MOST_ITEMS} more"] if len(others) > _MOST_ITEMS else []
    locations = {rank: values.location for rank, values in by_rank.items()}
    if len({*locations.values()}) > 1:
        lines.append(f"The ranks did not ask at the same line: {_on_ranks(locations)}")
    return "\n".join(lines)


def _detail_lines(item: Mismatch, adjective: str) -> list[str]:
    kinds = {entry.kind for entry in item.present}
    if None in item.entries.values() or len(kinds) > 1 or not kinds <= _TITLES.keys():
        reason = "Not every rank holds it" if None in item.entries.values() else "The ranks hold different things"
        text = _on_ranks({rank: entry or "nothing" for rank, entry in item.entries.items()})
        return ["Items are not the same on all ranks!", "", f"{reason}: {text}."]
    kind, lines = item.present[0].kind, []
    if kind != "tensor":
        lines = [f"{_on_ranks(item.entries)}."]
    elif not item.differing_ranks:
        lines = [f"On every rank, {item.present[0].nans}."]
    elif item.measurable:
        same = [rank for rank in item.entries if rank not in item.outlying_ranks]
        verb = plural_verb("differs", "differ", item.outlying_ranks)
        lines = [f"{capitalized(format_ranks(item.outlying_ranks))} {verb} from {format_ranks(same)}."]
        lines += _distance_lines(item)
    else:
        for number, (name, _) in enumerate(item.present[0].attributes):
            values = {rank: entry.attributes[number][1] for rank, entry in item.entries.items() if entry}
            if len({*values.values()}) > 1:
                lines.append(f"The values for attribute '{name}' do not match: {_on_ranks(values)}.")
    advice = [] if item.differing_ranks else [_NAN_ADVICE]
    return [f"{_TITLES[kind]} are not {adjective} on all ranks!", "", *lines, *advice]


def _distance_lines(item: Mismatch) -> list[str]:
    """Return lines on the distances, largest first, and on the NaNs of each rank."""
    worst_first = sorted(item.outlying_ranks if item.distances else (), key=lambda rank: -item.distances[rank][0])
    groups = list(group_by(worst_first, lambda rank: item.distances[rank][1]).items())
    lines = [
        f"{line} on {format_ranks(ranks)} against rank {item.reference}"
        for text, ranks in groups[:_MOST_GROUPS]
        for line in text.splitlines()
    ]
    rest = [rank for _, ranks in groups[_MOST_GROUPS:] for rank in ranks]
    lines += [f"Less far apart: {format_ranks(rest)}"] if rest else []
    nans = {rank: entry.nans or "no element is NaN" for rank, entry in item.entries.items() if entry}
    return [*lines, f"NaN: {_on_ranks(nans)}"] if len({*nans.values()}) > 1 else lines


def _short_description(item: Mismatch) -> str:
    if None in item.entries.values():
        return f"only on {format_ranks(rank for rank, entry in item.entries.items() if entry)}"
    noun = "values" if item.measurable else "what it is"
    return f"{noun}, on {format_ranks(item.outlying_ranks)}" if item.differing_ranks else "NaN on every rank"


def _spelled_path(item: Mismatch, name: str) -> str:
    return f"{name}{item.path}" if name or item.path.startswith("[") else item.path.removeprefix(".")


def _on_ranks(values: Mapping[int, object]) -> str:
    """Format values, grouping ranks: "a on rank 0; b on ranks 1 and 2"."""
    groups: Mapping[str, Sequence[int]] = group_by(values, lambda rank: str(values[rank]))
    return "; ".join(f"{text} on {format_ranks(ranks)}" for text, ranks in groups.items())
