"""DDP516: tables derived from data, such as label maps, compared between ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.script import OF_A_LIST, DerivedTable, LoaderPass
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by_value, minority_ranks, one_finding
from ddpcheck.judge.data.script_rows import have_same_labels


def judge_tables(
    tables: Sequence[Sequence[DerivedTable]], passes: Sequence[Sequence[LoaderPass]] = ()
) -> list[Finding]:
    """DDP516: dictionaries with the same keys and values on every rank, assigned differently.

    Also lists of the same texts in a different order, unless `passes` (over all loaders) show equal labels on all
    ranks. At most one finding: a label map has an inverse, and may have several names.
    """
    alike = have_same_labels(passes)
    by_name = [{o.name: o for o in rank_tables if not (alike and o.name.endswith(OF_A_LIST))} for rank_tables in tables]
    shared = [name for name in (by_name[0] if by_name else ()) if all(name in rank_tables for rank_tables in by_name)]
    names = [name for name in shared if _is_permuted(name, [rank_tables[name].values for rank_tables in by_name])]
    if not names:
        return []
    values = [rank_tables[names[0]].values for rank_tables in by_name]
    key = next(key for key in sorted(values[0]) if len({table[key] for table in values}) > 1)
    spelled = [tuple(table[key] for key in sorted(table)) for table in values]
    return one_finding(
        "DDP516",
        names,
        f"{names[0].removesuffix(OF_A_LIST)} has the same {len(values[0])} texts on every rank, in a different order."
        if names[0].endswith(OF_A_LIST)
        else f"{names[0]} has the same {len(values[0])} keys on every rank, with different values.",
        ranks=minority_ranks(spelled) if len(values) > 2 else (),
        location=by_name[0][names[0]].location,
        evidence=[f"{key}: {value}" for value in group_by_value([table[key] for table in values])],
    )


def _is_permuted(name: str, values: Sequence[Mapping[str, str]]) -> bool:
    """Return True if the same keys and values are assigned differently."""
    keys = sorted(values[0])
    if any(sorted(table) != keys for table in values) or all(table == values[0] for table in values):
        return False
    counts = [Counter(table.values()) for table in values]
    if len(keys) < 2 or any(count != counts[0] for count in counts):
        return False
    return _is_numbering(values[0]) and not _are_of_ranks(name, values)


def _is_numbering(table: Mapping[str, str]) -> bool:
    """Return True if the values identify keys: consecutive integers, or texts.

    Other values are measured (class counts on two ranks), describe a rank (`True` on one rank), or are the keys in the
    order of each rank's own samples.
    """
    values = set(table.values())
    if not all(value.lstrip("-").isdecimal() for value in values):
        return all(value.startswith(("'", '"')) for value in values)
    numbers = {int(value) for value in values if not value.startswith("-")}
    first = min(numbers, default=0)
    follow = numbers == set(range(first, first + len(numbers)))
    least = max(2, len(table)) if len(values) == len(table) else 1  # counts of words start at 1
    return follow and first < least and values != set(table)


_OF_RANKS = {
    *("me", "my", "mine", "rank", "self", "own", "local", "other", "remote", "peer", "partner", "buddy"),
    *("neighbour", "neighbor", "next", "prev", "previous", "left", "right", "src", "dst", "send", "recv", "device"),
}
_MOST_ROLES = 8  # larger tables are e.g. words of a text


def _are_of_ranks(name: str, values: Sequence[Mapping[str, str]]) -> bool:
    """Return True if a table describes ranks: ring neighbours, devices, rotations by rank."""
    texts = (name.rpartition(".")[2], *values[0])
    words = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    if len(values[0]) <= _MOST_ROLES and not _OF_RANKS.isdisjoint(words | {word.removesuffix("s") for word in words}):
        return True
    if all(re.search(_DEVICE, value) for value in values[0].values()):
        return True
    if len(values[0]) < 4 or not all(value.isdecimal() for value in values[0].values()):
        return False  # half of all permutations of 3 labels are rotations
    shifts = [{(int(table[key]) - int(values[0][key])) % len(table) for key in values[0]} for table in values]
    return all(len(shift) == 1 for shift in shifts)


_DEVICE = r"(?i)\b(cuda|gpu|npu|xpu|mps|rank|node|host|worker)[:_ -]?\d"
