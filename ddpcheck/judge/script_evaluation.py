"""DDP801 to 803: how a script evaluates, by what each rank's loops counted, exchanged and showed.

Pure functions from `findings.evidence.evaluation` (gathered by `monitor.script.recording.evaluation_recorder`) to
findings. Nothing is said unless a number of the program's is just what the fault makes of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.evaluation import EvaluationPass, MetricShown, ResultExchanged, ShownNumber
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, one_finding

_SAME = 2e-6  # relative: of float32
_APART = 1e-4  # relative: values that are not the same on two ranks
_FEWEST_DIGITS = 3  # of a printed number, before it is known by what is printed alone


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation on one rank: its pass over the loader, and what was exchanged and shown in its round."""

    loader: LoaderPass
    held: EvaluationPass
    exchanged: Sequence[ResultExchanged]
    shown: Sequence[MetricShown]

    @property
    def samples(self) -> int:
        return len(self.loader.indices)


_Key = tuple[Location | None, str, int, int]  # of a pass: line, dataset and its size, number


def judge_evaluations(
    loaders: Sequence[Sequence[LoaderPass]],
    passes: Sequence[Sequence[EvaluationPass]],
    exchanged: Sequence[Sequence[ResultExchanged]],
    shown: Sequence[Sequence[MetricShown]],
) -> list[Finding]:
    """At most one finding of each rule; all by rank, in order."""
    by_rank: list[dict[_Key, Evaluated]] = []
    for of_loaders, of_passes, of_exchanged, of_shown in zip(loaders, passes, exchanged, shown, strict=True):
        known = {(one.loader, one.number): one for one in of_loaders}
        theirs: dict[_Key, Evaluated] = {}
        for held in of_passes:
            if (loader := known.get((held.loader, held.number))) is not None and loader.exhausted:
                key = (loader.location, loader.dataset, loader.size, loader.number)
                theirs[key] = Evaluated(
                    loader,
                    held,
                    [one for one in of_exchanged if one.round == held.round],
                    [one for one in of_shown if one.round == held.round],
                )
        by_rank.append(theirs)
    found: dict[str, list[Finding]] = {}
    for key in by_rank[0] if by_rank else ():
        if all(key in theirs for theirs in by_rank):
            of_ranks = [theirs[key] for theirs in by_rank]
            for judge in (judge_padded, judge_own_shard, judge_order):
                findings = judge(of_ranks)
                if findings:
                    found.setdefault(findings[0].code, findings)
    return [finding for findings in found.values() for finding in findings]


# Samples that are counted twice


def judge_padded(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP801: a metric over more samples than there are, since a sampler gives some of them to two ranks."""
    times = Counter(index for one in of_ranks for index in one.loader.indices)
    excess = sum(times.values()) - len(times)
    most = len(of_ranks) * (1 + max(one.loader.batch_size for one in of_ranks))  # that complete a batch on each rank
    if len(set(times.values())) < 2 or excess >= most:  # each rank evaluates all of them, say
        return []
    if any(one.loader.replaces for one in of_ranks) or _are_other_data(of_ranks):
        return []
    seen = _counted_in_collective(of_ranks) or _divided_by_all(of_ranks) or _rows_of_all(of_ranks)
    if seen is None:
        return []
    what, where = seen
    one = of_ranks[0]
    return one_finding(
        "DDP801",
        (one.loader.dataset,),
        f"The metric is over {sum(times.values())} samples, and the ranks have {len(times)} different ones: "
        f"{counted(excess, 'sample')} {'counts' if excess == 1 else 'count'} twice.",
        location=one.loader.made or where or one.loader.location,
        evidence=[
            f"{one.loader.sampler} gives each rank {one.samples} of the {one.loader.size} samples",
            f"{what}{f' (at {where})' if where else ''}",
            f"the loop over the loader begins at {one.loader.location}",
        ],
    )


_Seen = tuple[str, Location | None]


def _counted_in_collective(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """Each rank gives a collective the number of its samples, or its mean over all of them."""
    samples = [one.samples for one in of_ranks]
    for given in _given(of_ranks):
        for values in given.values:
            if list(values) == samples:
                return f"{given.operation} is given their number, {samples[0]} on rank 0", given.location
            if _are_means_over_all(values, of_ranks):
                return f"{given.operation} is given each rank's mean over all of its samples", given.location
    return None


def _are_means_over_all(values: Sequence[float], of_ranks: Sequence[Evaluated]) -> bool:
    """Whether these are whole numbers that the ranks have counted, divided by how many samples each has."""
    for key in _common_keys(of_ranks):
        counts = [one.held.numbers[key] for one in of_ranks]
        proper = all(
            count == int(count) and 0 <= count <= one.samples for count, one in zip(counts, of_ranks, strict=True)
        )
        if not proper or all(count in (0, one.samples) for count, one in zip(counts, of_ranks, strict=True)):
            continue
        means = [count / one.samples for count, one in zip(counts, of_ranks, strict=True)]
        for scale in (1, 100):
            if all(_is(value, scale * mean) for value, mean in zip(values, means, strict=True)):
                return True
    return False


def _divided_by_all(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """What is shown is a count in the rows that a rank has gathered from all, divided by how many these are."""
    total = sum(one.samples for one in of_ranks)
    for one in of_ranks:
        gathers = [each for each in one.exchanged if each.during and "gather" in each.operation]
        counts = one.held.numbers
        counter = next((name for name, value in counts.items() if value == total), "")
        for shown, number in _numbers_shown(one):
            if gathers and counter and any(_shows(number, value / total) for value in counts.values() if value < total):
                return f"what is {shown.how} is divided by {counter}, which is {total}", gathers[0].location
    return None


def _rows_of_all(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """What is shown is how many gathered labels are equal, of all that were gathered."""
    gathered = _gathered(of_ranks)
    for number, first in enumerate(gathered):
        for second in gathered[number + 1 :]:
            equal = [_equal_rows(a, b) for a, b in zip(first.rows, second.rows, strict=True)]
            by_index: dict[int, bool] = {}
            for one, of_rank in zip(of_ranks, equal, strict=True):
                by_index |= dict(zip(one.loader.indices, of_rank, strict=True))
            wrong = sum(map(sum, equal)) / sum(map(len, equal))
            right = sum(by_index.values()) / len(by_index)
            if (seen := _first_shown(of_ranks, wrong, right)) is not None:
                return (
                    f"the {wrong:.6g} that is {seen.how} is that of all gathered rows; without those that are there "
                    f"twice, it is {right:.6g}",
                    first.location,
                )
    return None


# Metrics of one rank


def judge_own_shard(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP802: some ranks, not all, show a metric of their own shard, or save because of it, and others have others."""
    if len({frozenset(one.loader.indices) for one in of_ranks}) < 2 or min(one.samples for one in of_ranks) < 1:
        return []
    if any(_gathered([one]) for one in of_ranks):
        return []  # the results of all ranks are there
    for rank, one in enumerate(of_ranks):
        for shown, number in _numbers_shown(one):
            if all(any(other.location == shown.location for other in each.shown) for each in of_ranks):
                continue  # each rank tells its own
            for key, values, together in _metrics(of_ranks):
                if _is_own(number, rank, values, together) and not _is_known(
                    of_ranks, rank, key, number, values, together
                ):
                    return _own_shard(of_ranks, rank, shown, key, values, together)
    return []


def _metrics(of_ranks: Sequence[Evaluated]) -> Iterator[tuple[str, list[float], float]]:
    """What may be made of what the loops have counted: a name, the values by rank, and that of all ranks together."""
    samples, batches = [float(one.samples) for one in of_ranks], [float(one.loader.batches) for one in of_ranks]
    sizes = [float(max(one.loader.size, 1)) for one in of_ranks]
    for key in _common_keys(of_ranks):
        counts = [one.held.numbers[key] for one in of_ranks]
        for divisors in (samples, batches, sizes, [1.0] * len(of_ranks)):
            values = [count / divisor for count, divisor in zip(counts, divisors, strict=True)]
            if divisors[0] == 1.0:
                weights = samples
                together = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
            else:
                together = sum(counts) / (sizes[0] if divisors is sizes else sum(divisors))
            for scale in (1, 100):
                if divisors[0] != 1.0 or any(value != int(value) for value in values):  # no counter
                    yield key, [scale * value for value in values], scale * together


def _is_own(number: ShownNumber, rank: int, values: Sequence[float], together: float) -> bool:
    """Whether a number is that of a rank, which is another one than the others', and than that of all together."""
    own = values[rank]
    if own == int(own) and not number.text:  # any counter
        return False
    if not _shows(number, own) or _shows(number, together):
        return False
    return all(abs(value - own) > _APART * abs(own) for other, value in enumerate(values) if other != rank)


def _is_known(
    of_ranks: Sequence[Evaluated], rank: int, key: str, number: ShownNumber, values: Sequence[float], together: float
) -> bool:
    """Whether the ranks bring the metric together all the same; or it is not certain that it is the one shown."""
    one = of_ranks[rank]
    given = [value for each in one.exchanged for value in each.numbers]
    if any(_is(value, known) for value in given for known in (one.held.numbers[key], values[rank])):
        return True
    if given and not number.values:
        return True
    return any(_shows(other, together) for _, other in _numbers_shown(one))


def _own_shard(
    of_ranks: Sequence[Evaluated], rank: int, shown: MetricShown, key: str, values: Sequence[float], together: float
) -> list[Finding]:
    one = of_ranks[rank]
    function, _, variable = key.partition(".")
    others = [f"rank {r} has {value:.6g}" for r, value in enumerate(values[:4]) if r != rank]
    value = f"{values[rank]:.6g}"
    decides = shown.how == "decides"
    what = f"decides by {value} whether a file is saved" if decides else f"has {value} {shown.how}"
    return one_finding(
        "DDP802",
        (variable or key,),
        f"Rank {rank} {what}, a metric of its own {one.samples} samples; {others[0]}, and all "
        f"ranks together {together:.6g}.",
        ranks=(rank,),
        location=one.held.after.get(function) or shown.location,
        evidence=[
            f"it {'decides' if decides else f'is {shown.how}'} at {shown.location}",
            f"the loop over the loader begins at {one.loader.location}; each rank has other samples",
            *others[1:],
        ],
    )


# Results in another order than their labels


def judge_order(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP803: a metric of labels that were gathered rank by rank, against those of the dataset in its own order."""
    if min(one.samples for one in of_ranks) < 1 or _are_other_data(of_ranks):
        return []
    references = {name: labels for one in of_ranks for name, labels in one.held.references.items()}
    for given in _gathered(of_ranks):
        for name, labels in references.items():
            by_index: dict[int, bool] = {}
            for one, rows in zip(of_ranks, given.rows, strict=True):
                indices = one.loader.indices
                by_index |= {i: labels[i] == row for i, row in zip(indices, rows, strict=True) if i < len(labels)}
            if len(by_index) < len(labels):
                continue
            wrong = sum(a == b for a, b in zip(given.in_order, labels, strict=False)) / len(labels)
            right = sum(by_index.values()) / len(labels)
            if abs(wrong - right) > _APART and (seen := _first_shown(of_ranks, wrong, right)) is not None:
                one = of_ranks[0]
                begins = ", ".join(map(str, one.loader.indices[:4]))
                return one_finding(
                    "DDP803",
                    (one.loader.dataset,),
                    f"The results are gathered rank by rank and compared with labels in the order of the dataset: the "
                    f"{wrong:.6g} that is {seen.how} would be {right:.6g}, if each were compared with its own label.",
                    location=given.location,
                    evidence=[
                        f"rank 0 has samples {begins} ..., by {one.loader.sampler}",
                        f"the labels are {name} of the dataset",
                        f"it is {seen.how} at {seen.location}",
                    ],
                )
    return []


def _are_other_data(of_ranks: Sequence[Evaluated]) -> bool:
    """Whether an index is known to be another sample on another rank: the datasets are the ranks' own."""
    first, *others = (one.loader for one in of_ranks)
    for other in others:
        if first.digest and other.digest and first.digest != other.digest:
            return True
        common = [
            rows[index] == other.contents[place][index]
            for place, rows in first.contents.items()
            for index in rows.keys() & other.contents.get(place, {}).keys()
        ]
        if common and not any(common):
            return True
    return False


# Numbers


@dataclass(frozen=True, slots=True)
class _Given:
    """What the ranks have given to a collective: each number, by rank."""

    operation: str
    location: Location | None
    values: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A label for each sample, which collectives have brought together.

    Attributes:
        operation: The collective.
        location: Its line.
        rows: Those of each rank.
        in_order: All of them, as the collectives put them.
    """

    operation: str
    location: Location | None
    rows: Sequence[Sequence[int]]
    in_order: Sequence[int]


def _lines(of_ranks: Sequence[Evaluated]) -> Iterator[list[list[ResultExchanged]]]:
    """The calls of each line, by rank, of lines from which every rank has made as many."""
    keys = dict.fromkeys((one.operation, one.location, one.during) for one in of_ranks[0].exchanged)
    for key in keys:
        calls = [[o for o in one.exchanged if (o.operation, o.location, o.during) == key] for one in of_ranks]
        if len({len(of_rank) for of_rank in calls}) == 1:
            yield calls


def _given(of_ranks: Sequence[Evaluated]) -> Iterator[_Given]:
    for calls in _lines(of_ranks):
        first = calls[0][0]
        numbers = [
            [(*one.numbers, *(() if one.total is None else (one.total,))) for one in of_rank] for of_rank in calls
        ]
        if len({len(one) for of_rank in numbers for one in of_rank}) > 1:
            continue
        if first.during:  # in each batch: the sums of them
            numbers = [[tuple(map(sum, zip(*of_rank, strict=True)))] for of_rank in numbers]
        for of_call in zip(*numbers, strict=True):
            yield _Given(first.operation, first.location, list(zip(*of_call, strict=True)))


def _gathered(of_ranks: Sequence[Evaluated]) -> list[_Gathered]:
    found = []
    for calls in _lines(of_ranks):
        first = calls[0][0]
        if "gather" not in first.operation:
            continue
        for chunks in [calls] if first.during else [[[one] for one in of_call] for of_call in zip(*calls, strict=True)]:
            rows = [[row for one in of_rank for row in one.rows] for of_rank in chunks]
            if all(len(of_rank) == one.samples > 0 for of_rank, one in zip(rows, of_ranks, strict=True)):
                in_order = [row for of_call in zip(*chunks, strict=True) for one in of_call for row in one.rows]
                found.append(_Gathered(first.operation, first.location, rows, in_order))
    return found


def _equal_rows(one: Sequence[int], other: Sequence[int]) -> list[bool]:
    return [a == b for a, b in zip(one, other, strict=True)]


def _common_keys(of_ranks: Sequence[Evaluated]) -> list[str]:
    return [key for key in of_ranks[0].held.numbers if all(key in one.held.numbers for one in of_ranks)]


def _numbers_shown(one: Evaluated) -> Iterator[tuple[MetricShown, ShownNumber]]:
    return ((shown, number) for shown in one.shown for number in shown.numbers)


def _first_shown(of_ranks: Sequence[Evaluated], wrong: float, right: float) -> MetricShown | None:
    """Where a rank shows the one number, and none the other."""
    if _is(wrong, right) or any(_shows(n, s * right) for o in of_ranks for _, n in _numbers_shown(o) for s in (1, 100)):
        return None
    for one in of_ranks:
        for shown, number in _numbers_shown(one):
            if any(_shows(number, scale * wrong) for scale in (1, 100)):
                return shown
    return None


def _shows(number: ShownNumber, value: float) -> bool:
    """Whether it is the value that is shown: the number that the program holds, or one that is printed like it."""
    if number.values:
        return any(_is(held, value) or _is(100 * held, value) for held in number.values)
    text = number.text.lstrip("-")
    digits, _, _exponent = text.partition("e")
    if len(digits.replace(".", "").lstrip("0")) < _FEWEST_DIGITS or "e" in text:
        return False
    return f"{value:.{len(text.partition('.')[2])}f}" == number.text


def _is(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME)
