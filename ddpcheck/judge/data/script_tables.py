"""DDP516: tables that a program derives from its data, such as label maps, by what each rank has made of it."""

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
    """DDP516: dictionaries that have the same keys and the same values on every rank, put together differently.

    And lists of the same texts in another order, but for those of which no labels are made: `passes`, over all loaders,
    show the same ones on every rank. At most one finding: a label map has its inverse, and may have several names.
    """
    alike = have_same_labels(passes)
    by_name = [{o.name: o for o in of_rank if not (alike and o.name.endswith(OF_A_LIST))} for of_rank in tables]
    shared = [name for name in (by_name[0] if by_name else ()) if all(name in of_rank for of_rank in by_name)]
    names = [name for name in shared if _is_permuted(name, [of_rank[name].values for of_rank in by_name])]
    if not names:
        return []
    values = [of_rank[names[0]].values for of_rank in by_name]
    key = next(key for key in sorted(values[0]) if len({of_rank[key] for of_rank in values}) > 1)
    spelled = [tuple(of_rank[key] for key in sorted(of_rank)) for of_rank in values]
    return one_finding(
        "DDP516",
        names,
        f"{names[0].removesuffix(OF_A_LIST)} has the same {len(values[0])} texts on every rank, in a different order."
        if names[0].endswith(OF_A_LIST)
        else f"{names[0]} has the same {len(values[0])} keys on every rank, with different values.",
        ranks=minority_ranks(spelled) if len(values) > 2 else (),
        location=by_name[0][names[0]].location,
        evidence=[f"{key}: {value}" for value in group_by_value([of_rank[key] for of_rank in values])],
    )


def _is_permuted(name: str, values: Sequence[Mapping[str, str]]) -> bool:
    """Whether the same keys have the same values in another assignment."""
    keys = sorted(values[0])
    if any(sorted(of_rank) != keys for of_rank in values) or all(of_rank == values[0] for of_rank in values):
        return False
    counts = [Counter(of_rank.values()) for of_rank in values]
    if len(keys) < 2 or any(count != counts[0] for count in counts):
        return False
    return _is_numbering(values[0]) and not _are_of_ranks(name, values)


def _is_numbering(table: Mapping[str, str]) -> bool:
    """Whether values tell what a key is: names of one kind, or numbers from the first on.

    Others are measured (two classes that two ranks share have counts that are each other's), say what a rank does
    (`True` on one of them), or are the keys in another order, in which a rank goes through its own samples.
    """
    values = set(table.values())
    if not all(value.lstrip("-").isdecimal() for value in values):
        return all(value.startswith(("'", '"')) for value in values)
    numbers = {int(value) for value in values if not value.startswith("-")}
    first = min(numbers, default=0)
    follow = numbers == set(range(first, first + len(numbers)))
    least = max(2, len(table)) if len(values) == len(table) else 1  # the words of a part are counted from 1 on
    return follow and first < least and values != set(table)


_OF_RANKS = {
    *("me", "my", "mine", "rank", "self", "own", "local", "other", "remote", "peer", "partner", "buddy"),
    *("neighbour", "neighbor", "next", "prev", "previous", "left", "right", "src", "dst", "send", "recv", "device"),
}
_MOST_ROLES = 8  # more keys are words of a text, say


def _are_of_ranks(name: str, values: Sequence[Mapping[str, str]]) -> bool:
    """Whether a table says where a rank stands: a ring of neighbours, or an order that is rotated by rank."""
    texts = (name.rpartition(".")[2], *values[0])
    words = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    if len(values[0]) <= _MOST_ROLES and not _OF_RANKS.isdisjoint(words | {word.removesuffix("s") for word in words}):
        return True
    if all(re.search(_DEVICE, value) for value in values[0].values()):
        return True
    if len(values[0]) < 4 or not all(value.isdecimal() for value in values[0].values()):
        return False  # three labels in another order are as often a rotation as not
    shifts = [{(int(of_rank[key]) - int(values[0][key])) % len(of_rank) for key in values[0]} for of_rank in values]
    return all(len(shift) == 1 for shift in shifts)


_DEVICE = r"(?i)\b(cuda|gpu|npu|xpu|mps|rank|node|host|worker)[:_ -]?\d"
