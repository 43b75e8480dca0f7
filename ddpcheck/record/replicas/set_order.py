"""Whether texts stand in the order in which a set of them is gone through in this process: another one on each rank."""

from __future__ import annotations

from itertools import pairwise
from random import Random

_INSERTIONS = 200  # finds nearly all sets of up to 20 names, in less than a millisecond
_FEW = 20
_SLOTS = 32  # of a table, for each text in it: at most
_IN_ORDER = 0.75  # of neighbours in a set, where some have moved on from a slot that was taken; by chance it is half


def is_order_of_a_set(names: list[str]) -> bool:
    """Whether a set of them is gone through so: names whose hashes collide stand in the order of their insertion."""
    if len(names) > _FEW:
        return _follow_slots(names)
    orders, inserted = Random(0), list(names)
    for _ in range(_INSERTIONS):
        if names in (list(set(inserted)), list(set(dict.fromkeys(inserted)))):  # of a mapping: big from the beginning
            return True
        orders.shuffle(inserted)
    return False


def _follow_slots(names: list[str]) -> bool:
    """Whether the slots that their hashes give them in a table of some size go up, but for those that collide."""
    hashes, size = [hash(name) for name in names], 8
    while size < _SLOTS * len(names):
        rising = sum(one & (size - 1) <= other & (size - 1) for one, other in pairwise(hashes))
        if rising >= _IN_ORDER * (len(names) - 1):
            return True
        size *= 2
    return False
