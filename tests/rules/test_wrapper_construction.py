"""What ranks hand to DDP's constructor and is not alike, judged on evidence; and what is recorded of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.evidence.replicas import SizedVariable, WrapperBegun
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.record.replicas.tables import is_order_of_a_set
from ddpcheck.rules.replicas.descriptions import judge_constructions
from tests.reports import assert_says

HERE, THERE = Location("train.py", 30), Location("train.py", 40)


def begun(shapes: dict[str, tuple[int, ...]], *, frozen: Sequence[str] = (), **more: Any) -> WrapperBegun:
    parameters = [TensorRecord(name, shape, "float32", (), name not in frozen, "cpu") for name, shape in shapes.items()]
    kinds = [("", "Net", "", True), *((name.rpartition(".")[0], "Linear", "", True) for name in shapes)]
    described = ModuleDescription(tuple(parameters), modules=tuple(dict.fromkeys(kinds)))
    return replace(WrapperBegun("Net", (0, 1), described, {}, HERE), **more)


def counts(name: str, *sizes: int, kind: str = "list") -> list[SizedVariable]:
    return [SizedVariable(name, kind, size, Location("train.py", 20)) for size in sizes]


def judged(*ranks: WrapperBegun | Sequence[WrapperBegun]) -> list[Finding]:
    return judge_constructions([[one] if isinstance(one, WrapperBegun) else one for one in ranks])


PLAIN = {"body.weight": (8, 4), "head.weight": (8, 2)}
OTHER = {"critic.weight": (3, 3)}


def test_modules_that_are_alike() -> None:
    assert judged(begun(PLAIN), begun(PLAIN, location=THERE)) == []  # each in its branch
    assert judged([begun(PLAIN), begun(OTHER)], [begun(PLAIN), begun(OTHER)]) == []
    assert judged(begun(PLAIN, ranks=(0,)), begun(OTHER, ranks=(1,))) == []  # groups of one


@pytest.mark.parametrize(
    ("theirs", "code"),
    [
        (begun({**PLAIN, "more.weight": (2, 2)}), "DDP201"),
        (begun(dict(reversed(PLAIN.items()))), "DDP202"),
        (begun({**PLAIN, "head.weight": (8, 3)}), "DDP203"),
        (begun(PLAIN, frozen=["head.weight"]), "DDP206"),
        (begun(PLAIN, options={"find_unused_parameters": "True"}), "DDP221"),
        (begun(OTHER, module="Critic"), "DDP403"),
    ],
)
def test_modules_that_are_not_alike(theirs: WrapperBegun, code: str) -> None:
    assert_says(judged(begun(PLAIN), theirs), f"{code} ... at train.py:30")


def test_a_size_that_a_variable_counts() -> None:
    mine = begun({"head.weight": (5, 8)}, sizes=counts("classes", 4) + counts("rows", 5, 9))
    theirs = begun({"head.weight": (7, 8)}, sizes=counts("classes", 6) + counts("rows", 5, 9))
    words = "at train.py:20 ... is the size of classes plus 1; classes is a list of 4 items on rank 0"
    assert_says(judged(mine, theirs), words)
    other = judged(replace(mine, sizes=counts("rows", 5)), replace(theirs, sizes=counts("rows", 6)))
    assert_says(other, "DDP203 ... not is the size of")  # it does not count as many there


def test_modules_that_stand_in_the_order_of_a_set() -> None:
    shapes = {f"heads.{name}.weight": (2, size) for size, name in enumerate("abc", 1)}
    back = dict(reversed(shapes.items()))
    unordered = begun(shapes, from_sets=("heads",))
    assert_says(judged(unordered, begun(back, from_sets=("heads",))), "set of their names ... sorted")
    assert_says(judged(unordered, begun(back)), "DDP202 ... not set of their names")


def test_an_order_is_that_of_a_set_whatever_the_insertion_was() -> None:
    right = mistaken = 0
    for number in range(1, 101):  # hashes differ from process to process, so that this is counted
        names = [f"head_{number * letter}" for letter in range(3, 11)]
        for items in (list(set(names)), list(set(names[:4]) | set(names[4:]))):
            right += is_order_of_a_set(items)
            mistaken += is_order_of_a_set(items[::-1])
    assert right > 0.95 * 200 and mistaken < 0.05 * 200


def test_wrappers_that_are_constructed_in_another_order() -> None:
    first, second = begun(PLAIN), begun(PLAIN, location=THERE)  # alike, so that nothing is raised
    assert_says(judged([first, second], [second, first]), "DDP403 ... of ranks (0,) at train.py:30")
    assert judged([first], [second, first]) == []  # may be in two branches; nothing shows that they are not
