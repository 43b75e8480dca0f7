"""Whether a sampler of the user's own draws its order from the number of the epoch, by its code and its switches."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from ddpcheck.findings.source_lines import is_user_file

_NUMBER = "epoch"
_MOST_METHODS = 16
_DRAWN_BY = {
    *("randperm", "randint", "multinomial", "manual_seed", "default_rng", "RandomState", "Random", "random", "seed"),
    *("permutation", "permuted", "shuffle"),
}
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE")
_NAMES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


def epoch_of(sampler: Any) -> int:
    """The epoch that a sampler is at, by the attribute that its `set_epoch` assigns; negative where it has none."""
    value = getattr(sampler, _attribute(sampler), None)
    return value if type(value) is int else -1


def shuffles_by_epoch(sampler: Any) -> bool:
    """Whether a pass over a sampler of the user's class draws random numbers and reads the epoch.

    What its attributes switch off is not in the pass: the code after `if self.shuffle` where that is false, say.
    """
    code = getattr(getattr(type(sampler), "__iter__", None), "__code__", None)
    if code is None or not is_user_file(code.co_filename) or epoch_of(sampler) < 0:
        return False
    read: set[str] = set()
    pending = [code]
    for one in pending:  # which grows
        names = set(_reached(one, sampler))
        read |= names
        called = (getattr(getattr(type(sampler), name, None), "__code__", None) for name in names)
        inner = (part for part in one.co_consts if isinstance(part, CodeType))
        new = [found for found in (*called, *inner) if found is not None and found not in pending]
        pending += new[: max(0, _MOST_METHODS - len(pending))]
    return _attribute(sampler) in read and not read.isdisjoint(_DRAWN_BY)


def _attribute(sampler: Any) -> str:
    code = getattr(getattr(type(sampler), "set_epoch", None), "__code__", None)
    stored = [one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"] if code else []
    return stored[0] if len(stored) == 1 and isinstance(stored[0], str) else _NUMBER


def _reached(code: CodeType, sampler: Any) -> Iterator[str]:
    """The names that a function reads, in those of its branches that the attributes of the sampler allow."""
    steps = list(dis.get_instructions(code))
    places = {step.offset: number for number, step in enumerate(steps)}
    pending, seen = [0], {0}
    while pending:
        number = pending.pop()
        step = steps[number]
        if step.opname.startswith(_NAMES) and isinstance(step.argval, str):
            yield step.argval
        following = [] if step.opname.startswith(_ENDS) else [number + 1]
        if step.opcode in dis.hasjabs or step.opcode in dis.hasjrel:
            target = places[step.argval]
            taken = _is_taken(steps, number, sampler)
            if "IF_" not in step.opname and step.opname.startswith("JUMP_"):
                following = [target]
            elif taken is not None:
                following = [target] if taken else following
            else:
                following.append(target)
        for place in following:
            if place < len(steps) and place not in seen:
                seen.add(place)
                pending.append(place)


def _is_taken(steps: list[dis.Instruction], number: int, sampler: Any) -> bool | None:
    """Whether a jump that a plain attribute of the sampler decides is taken; `None` where that is not known."""
    name = steps[number].opname
    if "JUMP" not in name or not ("IF_FALSE" in name or "IF_TRUE" in name):
        return None
    before = [step for step in steps[max(0, number - 4) : number] if step.opname not in ("TO_BOOL", "CACHE")][-2:]
    if len(before) < 2 or before[1].opname != "LOAD_ATTR" or before[0].argval != "self":
        return None
    value = getattr(sampler, "__dict__", {}).get(before[1].argval)
    return ("IF_TRUE" in name) == value if type(value) is bool else None
