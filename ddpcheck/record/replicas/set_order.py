"""Detect lists whose order comes from iterating a set (hash-seed dependent)."""

from __future__ import annotations

from itertools import pairwise
from random import Random

_INSERTIONS = 200  # shuffles; finds nearly all sets of up to 20 names in under a millisecond
_FEW = 20
_SLOTS = 32  # maximum slots of a hash table, per name
_IN_ORDER = 0.75  # share of neighbors in slot order (collisions move some); by chance, it is half


def is_order_of_a_set(names: list[str]) -> bool:
    """Return True if some set of the names iterates in this order."""
    if len(names) > _FEW:
        return _follow_slots(names)
    orders, inserted = Random(0), list(names)
    for _ in range(_INSERTIONS):
        if names in (list(set(inserted)), list(set(dict.fromkeys(inserted)))):  # a set made of a mapping is presized
            return True
        orders.shuffle(inserted)
    return False


def _follow_slots(names: list[str]) -> bool:
    """Return True if the hash slots rise for some table size, except at collisions."""
    hashes, size = [hash(name) for name in names], 8
    while size < _SLOTS * len(names):
        rising = sum(current & (size - 1) <= following & (size - 1) for current, following in pairwise(hashes))
        if rising >= _IN_ORDER * (len(names) - 1):
            return True
        size *= 2
    return False
