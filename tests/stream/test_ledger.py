"""The ledger of backward passes, held against a simulator that follows numbers: each gradient is one."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.stream.ledger import Contribution, Ledger

RANKS = 2
LOOP = st.lists(
    st.sampled_from(["forward", "backward", "inner", "enter no_sync", "leave no_sync", "zero_grad", "step"]),
    max_size=24,
)


@dataclass
class Simulated:
    """A parameter of one number under DDP on two ranks, which do the same; `raised`: by 1, in that pass of rank 0.

    The gradient of each pass is a number of its rank. `notes` says whether a recorder sees the ends of reductions, and
    tells a pass around the wrapper from others, as that of `ddpcheck run` does.
    """

    raised: int = -1
    notes: bool = False
    weights: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    grads: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    events: list[LoopEvent] = field(default_factory=list)
    passes: int = 0
    _synchronises: bool = True
    _expects: bool = False  # DDP's reducer was prepared by a forward pass
    _weights_then: list[float] = field(default_factory=list)  # when the last backward pass had ended

    def note(self, kind: str, **more: Any) -> None:
        self.events.append(LoopEvent(kind, **more))

    def do(self, what: str) -> None:
        if what == "forward":
            self.note("forward", synchronises=self._synchronises)
            self._expects |= self._synchronises
        elif what in ("backward", "inner"):
            around = what == "inner" and self.notes and not self._expects
            self.note("forward inside" if around else "backward")
            self._backward()
        elif what == "zero_grad":
            fresh = any(self.grads) and self.weights == self._weights_then
            self.note("zero_grad", discarded=("weight",) if fresh else ())
            self.grads = [0.0] * RANKS
        elif what == "step":
            self.note("step")
            self.weights = [weight - grad for weight, grad in zip(self.weights, self.grads, strict=True)]
        else:
            self.note(what)
            self._synchronises = what == "leave no_sync"

    def _backward(self) -> None:
        own = [1.0 + rank + self.passes for rank in range(RANKS)]
        own[0] += self.passes == self.raised
        self.passes += 1
        self.grads = [grad + one for grad, one in zip(self.grads, own, strict=True)]
        if self._expects:
            self._expects = False
            self.grads = [sum(self.grads) / RANKS] * RANKS
            if self.notes:
                self.note("reduction")
        self._weights_then = list(self.weights)


def simulated(loop: list[str], **options: Any) -> Simulated:
    one = Simulated(**options)
    for what in loop:
        one.do(what)
    return one


@given(loop=LOOP, notes=st.booleans())
def test_the_fate_of_each_pass_is_that_of_its_number(loop: list[str], notes: bool) -> None:
    base = simulated(loop, notes=notes)
    made = Ledger(base.events).contributions
    assert len(made) == base.passes
    for number, one in enumerate(made):
        other = simulated(loop, notes=notes, raised=number)
        moved = [new != old for new, old in zip(other.weights, base.weights, strict=True)]
        kept = [new != old for new, old in zip(other.grads, base.grads, strict=True)]
        assert one.fate == ("used" if moved[0] else "open" if kept[0] else "discarded")
        if one.fate != "discarded":
            old, new = (base.weights, other.weights) if moved[0] else (base.grads, other.grads)
            assert one.reduced == (new[0] - old[0] == new[1] - old[1])


def ledger(letters: str, **options: Any) -> Ledger:
    """Of a loop: F and f are forward passes, after which DDP averages and not, B a backward pass, R a reduction."""
    kinds = {"f": "forward", "B": "backward", "R": "reduction", "S": "step", "i": "forward inside", "Z": "zero_grad"}
    kinds |= {"<": "enter no_sync", ">": "leave no_sync"}
    named = {
        "F": LoopEvent("forward", synchronises=True),
        "s": LoopEvent("step", spares_unreduced=True),
        "z": LoopEvent("zero_grad", discarded=("weight",)),
        "r": LoopEvent("zero_grad", discarded=("weight",), resting=True),
        "o": LoopEvent("backward", others=True),
        "c": LoopEvent("no_sync", location="train.py:3"),
    }
    return Ledger([named.get(letter) or LoopEvent(kinds[letter]) for letter in letters], **options)


def told(one: Contribution) -> str:
    return f"{'' if one.forward else 'unpaired '}{'reduced ' if one.reduced else ''}{one.fate}"


@pytest.mark.parametrize(
    ("letters", "fates"),
    [
        ("FBBRS", ["reduced used", "unpaired reduced used"]),  # its loss came in two parts
        ("FBRBS", ["reduced used", "unpaired used"]),
        ("ffBBS", ["used", "used"]),
        ("FffBBS", ["reduced used", "unpaired used"]),  # all that were averaged together are over
        ("iFBRS", ["unpaired reduced used", "reduced used"]),
        ("FBRfBsFBRS", ["reduced used", "reduced used", "reduced used"]),
        ("fBZS", ["used"]),  # it has zeroed something else
        ("zS", ["unpaired discarded"]),
    ],
)
def test_what_becomes_of_passes(letters: str, fates: list[str]) -> None:
    assert [told(one) for one in ledger(letters).contributions] == fates


@pytest.mark.parametrize(("letters", "lost"), [("FBz", 1), ("FBBz", 2), ("FBr", 0), ("FBoz", 0), ("FBSz", 1)])
def test_what_excuses_zeroing(letters: str, lost: int) -> None:
    assert len(ledger(letters).lost) == lost


def test_of_no_sync_the_line_of_the_call_is_kept() -> None:
    under, around = ledger("c<fB>S"), ledger("Fc<B>S")
    (one,) = under.used_unreduced
    assert one.no_sync_line == "train.py:3" and one.events[0] == LoopEvent("enter no_sync", location="train.py:3")
    assert [event.location for event in around.around_backward] == ["train.py:3"]
    assert not under.not_entered and len(ledger("cFBc<").not_entered) == 1


def test_a_loop_that_never_ends_takes_no_more_room() -> None:
    endless = ledger("cfB" * 40, kept=8)
    assert [len(kept) for kept in (endless.contributions, endless.open, endless.not_entered)] == [8] * 3
    assert len(ledger("f" * 40, kept=8).waiting) == 8
