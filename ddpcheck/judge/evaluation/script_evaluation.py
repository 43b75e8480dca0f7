"""DDP801, 802 and 805: how a script evaluates, by what each rank's loops counted, exchanged and showed.

Nothing is said unless a number of the program's is just what the fault makes of it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, one_finding
from ddpcheck.judge.evaluation.evaluation_results import (
    Evaluated,
    are_other_data,
    are_quotients,
    common_keys,
    equal_rows,
    first_shown,
    gathered_labels,
    given_numbers,
    is_close,
    numbers_shown,
    shows,
)
from ddpcheck.judge.evaluation.script_order import judge_order
from ddpcheck.judge.evaluation.script_shares import judge_lone_share

_APART = 1e-4  # relative: values that are not the same on two ranks
_ALL_DIGITS = 10
_LARGEST_EXPONENT = 50.0  # of a perplexity
_PLACE = re.compile(r"\[\d+\]$")
_SOME = 0.01  # relative: a difference between metrics that matters

_Key = tuple[Location | None, Location | None, str, int, int]
"""Of a pass: its line, where the loader is made, the dataset, its number, and how many others of these came before."""


def judge_evaluations(
    loaders: Sequence[Sequence[LoaderPass]],
    passes: Sequence[Sequence[EvaluationPass]],
    exchanged: Sequence[Sequence[ResultExchanged]],
    shown: Sequence[Sequence[MetricShown]],
    compared: Sequence[Sequence[RowsCompared]] = (),
) -> list[Finding]:
    """At most one finding of each rule; all by rank, in order."""
    by_rank: list[dict[_Key, Evaluated]] = []
    rows = compared or [()] * len(loaders)
    every = zip(loaders, passes, exchanged, shown, rows, strict=True)
    for of_loaders, of_passes, of_exchanged, of_shown, of_rows in every:
        known = {(one.loader, one.number): one for one in of_loaders}
        subsets = {one.loader: one.subset for one in of_loaders if len(one.subset)}
        theirs: dict[_Key, Evaluated] = {}
        for held in {(one.loader, one.number): one for one in of_passes}.values():  # one may be written once more
            if (loader := known.get((held.loader, held.number))) is not None and loader.exhausted:
                place = (loader.location, loader.made, loader.dataset, loader.number)
                theirs[*place, sum(key[:-1] == place for key in theirs)] = Evaluated(
                    loader,
                    held,
                    [
                        one
                        for one in of_exchanged
                        if one.round == held.round
                        and (not one.during or one.evaluation in (None, (held.loader, held.number)))
                    ],
                    [one for one in of_shown if one.round == held.round],
                    subsets.get(loader.loader, ()),
                    [one for one in of_rows if one.round == held.round],
                )
        by_rank.append(theirs)
    found: dict[str, list[Finding]] = {}
    for key in by_rank[0] if by_rank else ():
        if all(key in theirs for theirs in by_rank):
            of_ranks = [theirs[key] for theirs in by_rank]
            for judge in (judge_padded, judge_own_shard, judge_order, judge_mean_of_means):
                findings = judge(of_ranks)
                if findings:
                    found[findings[0].code] = _in_one([*found.get(findings[0].code, []), *findings])
    if "DDP802" not in found:
        found["DDP802"] = judge_lone_share(by_rank, loaders)
    return [finding for findings in found.values() for finding in findings]


def _in_one(findings: Sequence[Finding]) -> list[Finding]:
    """The first of several findings of a rule; with other metrics of an own shard, each by its first value."""
    first = findings[0]
    for one in findings if first.code == "DDP802" else ():
        if one.ranks == first.ranks and not set(one.subjects) <= set(first.subjects):
            told = f"also {', '.join(one.subjects)}: {one.message}"
            first = replace(first, subjects=(*first.subjects, *one.subjects), evidence=(*first.evidence, told))
    return [first]


# Samples that are counted twice


def judge_padded(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP801: a metric over more samples than there are, since a sampler gives some of them to two ranks."""
    times = Counter(index for one in of_ranks for index in one.loader.indices)
    excess = sum(times.values()) - len(times)
    most = len(of_ranks) * (1 + max(one.batch for one in of_ranks))  # that complete a batch on each rank
    if len(set(times.values())) < 2 or excess >= most:  # each rank evaluates all of them, say
        return []
    if any(one.loader.replaces for one in of_ranks) or are_other_data(of_ranks) or _take_own_places(of_ranks):
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


def _take_own_places(of_ranks: Sequence[Evaluated]) -> bool:
    """Whether the sampler repeats nothing: what two ranks have comes from `Subset`s that are not the same (DDP516)."""
    subsets = [one.subset for one in of_ranks]
    if not all(subsets) or all(list(one) == list(subsets[0]) for one in subsets):
        return False
    by_index = [{index: place for place, index in enumerate(one)} for one in subsets]
    places = [found.get(index) for found, one in zip(by_index, of_ranks, strict=True) for index in one.loader.indices]
    return len(set(places)) == len(places)


_Seen = tuple[str, Location | None]


def _counted_in_collective(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """Each rank gives a collective the number of its samples, or its mean over all of them."""
    samples = [one.samples for one in of_ranks]
    for given in given_numbers(of_ranks):
        for values in given.values:
            if list(values) == samples:
                return f"{given.operation} is given their number, {samples[0]} on rank 0", given.location
            if _are_means_over_all(values, of_ranks):
                return f"{given.operation} is given each rank's mean over all of its samples", given.location
    return None


def _are_means_over_all(values: Sequence[float], of_ranks: Sequence[Evaluated]) -> bool:
    """Whether these are whole numbers that the ranks have counted, divided by how many samples each has."""
    for key in common_keys(of_ranks):
        counts = [one.held.numbers[key] for one in of_ranks]
        proper = all(
            count == int(count) and 0 <= count <= one.samples for count, one in zip(counts, of_ranks, strict=True)
        )
        if not proper or all(count in (0, one.samples) for count, one in zip(counts, of_ranks, strict=True)):
            continue
        if are_quotients(values, counts, [one.samples for one in of_ranks]):
            return True
    return False


def _divided_by_all(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """What is shown is a count in the rows that a rank has gathered from all, divided by how many these are."""
    total = sum(one.samples for one in of_ranks)
    for one in of_ranks:
        gathers = [each for each in one.exchanged if each.during and "gather" in each.operation]
        counts = one.held.numbers
        counter = next((name for name, value in counts.items() if value == total), "")
        for shown, number in numbers_shown(one):
            if gathers and counter and any(shows(number, value / total) for value in counts.values() if value < total):
                return f"what is {shown.how} is divided by {counter}, which is {total}", gathers[0].location
    return None


def _rows_of_all(of_ranks: Sequence[Evaluated]) -> _Seen | None:
    """What is shown is how many gathered labels are equal, of all that were gathered; or the mean of numbers."""
    gathered = gathered_labels(of_ranks)
    results: list[tuple[Location | None, list[list[float]]]] = [
        (first.location, [[*map(float, equal_rows(*rows))] for rows in zip(first.rows, second.rows, strict=True)])
        for first, second in itertools.combinations(gathered, 2)
    ]
    for given in gathered:  # a number for each sample: its loss, or whether it is right
        if given.values and all(len(row) == 1 for of_rank in given.values for row in of_rank):
            results.append((given.location, [[row[0] for row in of_rank] for of_rank in given.values]))
    for where, of_each in results:
        known = [
            pair
            for one, of_rank in zip(of_ranks, of_each, strict=True)
            if len(of_rank) == len(one.loader.indices)
            for pair in zip(one.loader.indices, of_rank, strict=True)
        ]
        wrong = sum(map(sum, of_each)) / max(1, sum(map(len, of_each)))
        # of the first copy of each sample, or of the last: padding, say, may have made them different
        right, other = (sum(one.values()) / max(1, len(one)) for one in (dict(known[::-1]), dict(known)))
        if known and (seen := first_shown(of_ranks, wrong, right, other)) is not None:
            return (
                f"the {wrong:.6g} that is {seen.how} is that of all gathered rows; without those that are there twice, "
                f"it is {right:.6g}",
                where,
            )
    return None


# Metrics of one rank


def judge_own_shard(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP802: some ranks, not all, show metrics of their own shard, or save because of them, and others have others.

    A finding for each number that is shown.
    """
    if len({frozenset(one.loader.indices) for one in of_ranks}) < 2 or min(one.samples for one in of_ranks) < 1:
        return []
    if any(gathered_labels([one]) for one in of_ranks):
        return []  # the results of all ranks are there
    found: list[Finding] = []
    metrics, ratios = list(_metrics(of_ranks)), list(_ratios(of_ranks))
    for rank, one in enumerate(of_ranks):
        for shown, number in numbers_shown(one):
            if all(any(other.location == shown.location for other in each.shown) for each in of_ranks):
                continue  # each rank tells its own
            for key, values, together in [*metrics, *(ratios if _is_exact(number) else ())]:
                if _is_own(number, rank, values, together) and not _is_known(
                    of_ranks, rank, key, number, values, together
                ):
                    found += _own_shard(of_ranks, rank, shown, key, values, together)
                    break
    return found


def _metrics(of_ranks: Sequence[Evaluated]) -> Iterator[tuple[str, list[float], float]]:
    """What may be made of what the loops have counted: a name, the values by rank, and that of all ranks together."""
    samples, batches = [float(one.samples) for one in of_ranks], [float(one.loader.batches) for one in of_ranks]
    sizes = [float(max(one.loader.size, 1)) for one in of_ranks]
    for key in common_keys(of_ranks):
        counts = [one.held.numbers[key] for one in of_ranks]
        whole = [] if sizes == samples else [sizes]  # else each rank has a dataset of its own
        for divisors in (samples, batches, *whole, [1.0] * len(of_ranks)):
            values = [count / divisor for count, divisor in zip(counts, divisors, strict=True)]
            if divisors[0] == 1.0:
                weights = samples
                together = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
            else:
                together = sum(counts) / (sizes[0] if divisors is sizes else sum(divisors))
            for scale in (1, 100):
                if divisors[0] != 1.0 or any(value != int(value) for value in values):  # no counter
                    yield key, [scale * value for value in values], scale * together


def _is_exact(number: ShownNumber) -> bool:
    """Whether so many of its digits are known that it is hardly another one by chance: 50.0 is, all of them known."""
    return any(sum(map(str.isdigit, text)) >= _ALL_DIGITS for text in (number.text, *map(repr, number.values)))


def _ratios(of_ranks: Sequence[Evaluated]) -> Iterator[tuple[str, list[float], float]]:
    """Likewise of what one function has counted and another number that it has (of tokens, say), and their exponential.

    These are many: they are only for numbers that are known to many digits.
    """
    keys = common_keys(of_ranks)
    kept_in = {key: _kept_in(key) for key in keys}
    for key, other in itertools.permutations(keys, 2):
        if key.partition(".")[0] != other.partition(".")[0] or kept_in[key] != kept_in[other]:
            continue
        counts, divisors = ([one.held.numbers[name] for one in of_ranks] for name in (key, other))
        if any(divisor < 2 or divisor != int(divisor) for divisor in divisors):
            continue
        values = [count / divisor for count, divisor in zip(counts, divisors, strict=True)]
        together = sum(counts) / sum(divisors)
        for scale in (1, 100):
            yield key, [scale * value for value in values], scale * together
        if max(map(abs, values)) < _LARGEST_EXPONENT:
            yield key, list(map(math.exp, values)), math.exp(together)


def _kept_in(key: str) -> str:
    """The tensor or list of which a number is one, by its place; two of these are not put together."""
    return key.rpartition("[")[0] if _PLACE.search(key) else ""


def _is_own(number: ShownNumber, rank: int, values: Sequence[float], together: float) -> bool:
    """Whether a number is that of a rank, which is another one than the others', and than that of all together."""
    own = values[rank]
    if is_close(own, round(own)) and not number.text:  # any counter, and a sum of fractions that comes near one
        return False
    if not shows(number, own) or shows(number, together):
        return False
    return all(abs(value - own) > _APART * abs(own) for other, value in enumerate(values) if other != rank)


def _is_known(
    of_ranks: Sequence[Evaluated], rank: int, key: str, number: ShownNumber, values: Sequence[float], together: float
) -> bool:
    """Whether the ranks bring the metric together all the same; or it is not certain that it is the one shown."""
    one = of_ranks[rank]
    given = [value for each in one.exchanged for value in each.numbers]
    if any(is_close(value, known) for value in given for known in (one.held.numbers[key], values[rank])):
        return True
    if given and not number.values:
        return True
    for each in one.exchanged:  # a sum and its count
        quotients = (a / b for a, b in itertools.permutations(each.numbers, 2) if b)
        if any(is_close(values[rank], scale * quotient) for quotient in quotients for scale in (1, 100)):
            return True
    told = [other for _, other in numbers_shown(one)]
    of_all = all(any(shows(other, value) for other in told) for value in values)  # which it has by broadcasts, say
    return of_all or any(shows(other, together) for other in told)


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


# Means of means


def judge_mean_of_means(of_ranks: Sequence[Evaluated]) -> list[Finding]:
    """DDP805: what is shown is the mean of the ranks' means, and the ranks have evaluated more and fewer samples."""
    samples = [one.samples for one in of_ranks]
    if min(samples) < 1 or len(set(samples)) < 2:
        return []
    for given in given_numbers(of_ranks):
        for values in given.values:
            if not _are_means(values, of_ranks):
                continue
            plain = sum(values) / len(values)
            right = sum(value * count for value, count in zip(values, samples, strict=True)) / sum(samples)
            if abs(plain - right) <= _SOME * abs(right) or (seen := first_shown(of_ranks, plain, right)) is None:
                continue
            return one_finding(
                "DDP805",
                (of_ranks[0].loader.dataset,),
                f"The {plain:.6g} that is {seen.how} is the mean of the ranks' means, and the ranks have evaluated "
                f"{min(samples)} to {max(samples)} samples: over all samples it is {right:.6g}.",
                location=given.location,
                evidence=[
                    f"rank {rank} gives {given.operation} {value:.6g}, its mean over {counted(count, 'sample')}"
                    for rank, (value, count) in enumerate(list(zip(values, samples, strict=True))[:4])
                ]
                + [f"it is {seen.how} at {seen.location}"],
            )
    return []


def _are_means(values: Sequence[float], of_ranks: Sequence[Evaluated]) -> bool:
    """Whether these are what the ranks have added up, divided by the number of their own samples or batches."""
    counts = [[one.samples for one in of_ranks], [max(1, one.loader.batches) for one in of_ranks]]
    sums = [[one.held.numbers[key] for one in of_ranks] for key in common_keys(of_ranks)]
    return any(are_quotients(values, of_key, of_kind) for of_key in sums for of_kind in counts)
