"""What happens to gradients between backward passes and steps: clips, other changes, and whether they are zeroed.

Programs zero gradients in many ways, so a parameter of each optimizer is asked what is there: the ledger, which takes
in the events of a wrapper's loop, does not know of them.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad

from ddpcheck.findings.evidence.loop import GradientsChanged, GradientsLeft
from ddpcheck.findings.evidence.script import GradientsClipped, GradientsZeroed
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location, variables_of
from ddpcheck.gather.autograd.autograd_graph import walk_graph
from ddpcheck.gather.autograd.exchanges import has_parts, part_of_gradient
from ddpcheck.gather.ddp.optimizer_options import parameters_of
from ddpcheck.gather.patching import Recorder, patched
from ddpcheck.gather.state.fingerprints import InRows, fingerprint, in_rows, is_shard, version_of
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.gather.steps.gradient_distance import dense, has_gradient, norms
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.program_state import names_of_parameters

_WITH_NORM = "_clip_grads_with_norm_"  # private to torch; what clip_grad_norm_ calls, however it was imported
_SAME = 1e-4
_FEW = 4  # elements: numbers that are reduced, and no gradients
_MOST_GIVEN = 4096  # tensors of a step


class ClipRecorder(Recorder, subjects=("optimizers",)):
    """Follows clips, and in some steps the norm of all gradients from one backward pass to the next.

    Attributes:
        follows: Whether it has seen something since an optimizer's step, or the beginning of a backward pass.
    """

    def __init__(self, run: Recording, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Begin; `before` and `after` are called before and after each clip."""
        self.follows = False
        self._run = run
        self._before, self._after = before, after
        self._clips = 0
        self._last: tuple[str, Location | None] = ("", None)
        self._line: Location | None = None  # of the last backward pass
        self._norms: dict[int, float] = {}  # by number of a wrapper, as backward has left them
        patch_clip_grad_norm(self._clips_norm)
        patched(nn.utils, "clip_grad_value_", self._clips_value)

    def _clips_norm(self, *arguments: Any, **named: Any) -> Generator[None, Any, None]:
        norm = norm_given(arguments, named)
        self._before()
        result = yield
        limit = named["max_norm"] if "max_norm" in named else arguments[1]
        self._clipped("clip_grad_norm_", result if norm is None else norm, limit)

    def _clips_value(self, *arguments: Any, **named: Any) -> Iterator[None]:
        given = arguments[0] if arguments else named.get("parameters")
        is_list = isinstance(given, torch.Tensor | list | tuple)
        norm = _norm(given) if is_list and self._run.is_written(self._clips) else None
        self._before()
        yield
        self._clipped("clip_grad_value_", norm)

    def _clipped(self, name: str, norm: Any, limit: Any = 0.0) -> None:
        if norm is math.inf:
            return
        self._last, self.follows = (name, user_location()), True
        if type(norm) in (torch.Tensor, float) and self._run.is_written(self._clips) and not math.isnan(norm):
            clip = self._clips, float(norm), self._last[1], self._run.steps, name, float(limit), has_parts()
            self._run.add(GradientsClipped(*clip))
        self._clips += 1
        self._after()

    def backward_begins(self) -> None:
        """A backward pass of the script begins: what have gradients become since the last one?"""
        known = self._norms
        here = user_location() if known else None
        for watch in list(self._run.watches) if known else ():
            before = known.get(watch.number)
            if before is None:
                continue
            now = _norm(watch.parameters.values()) or 0.0
            if 0.0 < now < math.inf and abs(now - before) > _SAME * before:
                name, where = self._last
                put_off = watch.has_unreduced
                if put_off or here == self._line:  # else the next loss may be of other parameters
                    change = now / before
                    where = where or here
                    self._run.add(GradientsChanged(watch.number, self._run.steps, name, change, where, put_off))
        self.forget()

    def backward_ended(self) -> None:
        """It has ended, in a step that is looked at."""
        self._line, self.follows = user_location(), True
        for watch in list(self._run.watches):
            norm = _norm(watch.parameters.values(), watch.reduced_gradients)
            if norm is not None and 0.0 < norm < math.inf:
                self._norms[watch.number] = norm

    def forget(self) -> None:
        """An optimizer is about to step: what comes now is no change on the way to it."""
        self._norms, self._last, self.follows = {}, ("", None), False


def kinds_clipped(error: BaseException) -> list[list[str]]:
    """The names of the parameters that `clip_grad_norm_` was given when it has raised: those of shards, then others."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    found = next((frame for frame in frames if frame.f_code.co_name == "clip_grad_norm_"), None)
    given = None if found is None else variables_of(found).get("parameters")
    trained = [p for p in given if p.grad is not None] if isinstance(given, list | tuple) else []
    names = names_of_parameters({id(p) for p in trained}) if trained else {}
    return [[names.get(id(p), "?").partition(".")[2] for p in trained if is_shard(p) is kind] for kind in (True, False)]


def patch_clip_grad_norm(before: Callable[..., Any]) -> None:
    """Have each clip by the norm of all gradients followed, with what it is given (see `norm_given`)."""
    known = hasattr(clip_grad, _WITH_NORM)
    patched(clip_grad if known else nn.utils, _WITH_NORM if known else "clip_grad_norm_", before)


def norm_given(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The norm that a clip is given, if it is given one; infinite for one that only asks for the norm."""
    if math.isinf(named["max_norm"] if "max_norm" in named else arguments[1]):
        return math.inf
    if not hasattr(clip_grad, _WITH_NORM):
        return None
    return named["total_norm"] if "total_norm" in named else arguments[2]


def _norm(parameters: Any, rows: InRows | None = None) -> float | None:
    """The norm of all gradients of these parameters together; `rows`: the gradients, where they are in rows."""
    if rows is None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        rows = in_rows({str(number): p.grad for number, p in enumerate(given) if p.grad is not None})
    if not rows.names or any(type(gradient) is not torch.Tensor for gradient in rows.others.values()):
        return None
    return math.hypot(*norms(rows).values())


_MOST_LOOKED_AT = 16  # steps of an optimizer
_MOST_STEPS = 1024  # of all of them
_FEWEST_LEFT = 3  # steps, one after the other
_FEWEST_ZEROED = 2  # likewise
_SOME_PARAMETERS = 8

_State = tuple[Callable[[], Any], int]  # a gradient, and its version
_NONE: _State = (lambda: None, 0)


@dataclass(slots=True)
class _Followed:
    number: int
    sample: Callable[[], Any]  # a parameter
    plain: bool  # whether its gradient is a tensor, and no shard
    steps: int = 0
    now: _State = _NONE  # its gradient, as the last backward pass, or what has clipped it, has left it

    left: int = 0  # a fingerprint of its gradient after a step; 0 where it is zero or gone
    own: bool = False  # whether that step was its optimizer's
    line: Location | None = None  # of the last backward pass that has reached it
    mixed: tuple[Location | None, Location | None] | None = None  # of a pass that added to what was left, and of that
    times_left: int = 0
    held: list[Callable[[], Any]] = field(default_factory=list)  # the parameters with a gradient that was left
    told: bool = False

    zeroed: dict[Location | None, int] = field(default_factory=dict)  # how often since the last step, by line
    zeroed_before: dict[Location | None, int] = field(default_factory=dict)  # likewise, before that step
    times_zeroed: int = 0  # steps, one after the other, in which that was the same
    for_inputs: bool = False  # a backward pass since the last step was for inputs (an attack, a penalty)


class ZeroingRecorder(Recorder, subjects=("loop",)):
    """Follows a parameter of each optimizer, in its first steps; hands what it finds to `sink`, `names` names them.

    Attributes:
        follows: Whether it looks at one of them.
    """

    def __init__(
        self,
        sink: Callable[[GradientsLeft | GradientsZeroed], object],
        names: Callable[[list[torch.Tensor]], tuple[str, ...]],
    ) -> None:
        self._sink = sink
        self._names = names
        self._steps = 0
        self._known: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()
        self.follows = False

    def begins_to_step(self, optimizer: Any, number: int) -> bool:
        """An optimizer is about to step; returns whether it is one of those that are looked at no more."""
        one = self._known.get(optimizer)
        if one is None:
            held = [p for p in parameters_of(optimizer) if p.grad is not None]
            if held:
                plain = type(held[0].grad) is torch.Tensor
                self._known[optimizer] = _Followed(number, tensor_ref(held[0]), plain)
                self.follows = True
            return False
        self._tell_left(optimizer, one)
        self._tell_zeroed(one)
        return one.steps >= _MOST_LOOKED_AT

    def has_stepped(self, optimizer: Any, steps: int) -> None:
        """It has stepped, of all optimizers the last of so many times: what do all of them leave behind?"""
        self._steps = steps
        living = self._living()
        self.follows = bool(living)
        for other, one in living:
            one.steps += other is optimizer
            if one.plain and (other is optimizer or not one.left):
                one.left, one.own = _mark(one.sample()), other is optimizer

    def backward_begins(self, loss: Any) -> None:
        """A backward pass of the script begins from `loss`."""
        leaves: Iterable[Any] | None = None
        for optimizer, one in self._living():
            one.now = _gradient_of(one)
            if (one.left or one.mixed) and not (value := _mark(one.sample())):
                one.left, one.mixed = 0, None  # zeroed
                if one.steps == 1 and (kept := next(filter(_mark, parameters_of(optimizer)), None)) is not None:
                    one.sample, one.plain = tensor_ref(kept), type(kept.grad) is torch.Tensor  # and this one is not
            elif one.left and value != one.left:
                one.left = 0
            elif one.left and one.times_left == _FEWEST_LEFT - 1:
                one.held = [tensor_ref(p) for p in parameters_of(optimizer) if _mark(p)]
            if _repeats(one.zeroed_before) and not one.for_inputs and isinstance(loss, torch.Tensor):
                leaves = walk_graph([loss]).leaves if leaves is None else leaves
                one.for_inputs = any(not isinstance(leaf, nn.Parameter) for leaf in leaves)

    def backward_ended(self) -> None:
        here: Location | None = None
        for _, one in self._living():
            if not one.plain or getattr(one.sample(), "grad", None) is None or _is_as_it_was(one):
                continue
            here = here or user_location()
            if one.left:
                one.mixed, one.left = (one.line, here), 0
            one.line = here
        self.note_changed()

    def note_changed(self) -> None:
        """The gradients are as they are to be used: a backward pass has ended, or they are clipped."""
        for _, one in self._living():
            one.now = _gradient_of(one)

    def zeroes(self, optimizer: Any) -> None:
        """The program zeroes the gradients of an optimizer."""
        one = self._known.get(optimizer)
        if one is None or one.steps >= _MOST_LOOKED_AT:
            return
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if gradients and bool(sum(float(dense(g).detach().abs().sum()) for g in gradients[:_SOME_PARAMETERS])):
            where = user_location()
            one.zeroed[where] = one.zeroed.get(where, 0) + 1

    def _tell_left(self, optimizer: Any, one: _Followed) -> None:
        mixed, one.mixed = one.mixed, None
        again = mixed is not None and (one.own or mixed[0] != mixed[1])
        one.times_left = one.times_left + 1 if again else 0
        if mixed is not None and one.times_left == _FEWEST_LEFT and not one.told:
            one.told = True
            held = [p for ref in one.held if (p := ref()) is not None]
            every = len([p for p in parameters_of(optimizer) if p.grad is not None])
            names = self._names(held) if len(held) < every else ()
            self._sink(GradientsLeft(one.number, one.own, mixed[0], mixed[1], user_location(), names))

    def _tell_zeroed(self, one: _Followed) -> None:
        """Tell it where it was so, at the same line and as often, before several steps, one after the other.

        Not where a gradient is another one than backward has left: the program has made it of those that it zeroed.
        """
        repeats = one.zeroed == one.zeroed_before and _repeats(one.zeroed)
        again = repeats and _is_as_it_was(one) and not one.for_inputs
        one.times_zeroed = one.times_zeroed + 1 if again else 0
        if one.times_zeroed == _FEWEST_ZEROED:
            where = max(one.zeroed, key=lambda line: one.zeroed[line])
            self._sink(GradientsZeroed(one.number, one.zeroed[where], where))
        one.zeroed, one.zeroed_before = {}, one.zeroed
        one.for_inputs = False

    def _living(self) -> list[tuple[Any, _Followed]]:
        if not self.follows or self._steps >= _MOST_STEPS:
            return []
        return [(other, one) for other, one in list(self._known.items()) if one.steps < _MOST_LOOKED_AT]


def _repeats(zeroed: dict[Location | None, int]) -> bool:
    return any(times > 1 for times in zeroed.values())


def _gradient_of(one: _Followed) -> _State:
    gradient = getattr(one.sample(), "grad", None)
    return _NONE if gradient is None else (tensor_ref(gradient), version_of(gradient))


def _is_as_it_was(one: _Followed) -> bool:
    gradient, (before, version) = getattr(one.sample(), "grad", None), one.now
    return gradient is not None and before() is gradient and version_of(gradient) == version


def _mark(parameter: Any) -> int:
    """A fingerprint of its gradient; 0 where there is none, or it is zero."""
    if parameter is None or not has_gradient(parameter):
        return 0
    return fingerprint(dense(parameter.grad)) or 1


class GivenRecorder(Recorder, subjects=("optimizers", "data")):
    """The inputs of all_reduces of all ranks in a sampled step.

    Attributes:
        of_a_part: The line of one that is given the gradient of a parameter which this rank has for itself.
        before: The line of the largest collective of all ranks before the first backward pass: of parameters, perhaps.
        clear: Forgets these inputs after a step.
    """

    def __init__(self, run: Recording) -> None:
        self.of_a_part: Location | None = None
        self.before: Location | None = None
        self._largest: tuple[int, str] = (0, "")  # elements, line
        self._began = False
        self._run = run
        self._given: list[tuple[int, int]] = []  # elements, fingerprint
        self.clear = self._given.clear
        self._parts: Counter[int] = Counter()  # by identity, how often its gradient was given

    def note(self, call: Call, given: Mapping[str, Any]) -> None:
        tensor = given.get("tensor")
        if len(call.members) != dist.get_world_size():
            return
        if call.elements > max(self._largest[0], _FEW):
            self._largest = call.elements, call.location
        if call.operation != "all_reduce" or type(tensor) is not torch.Tensor or not tensor.is_floating_point():
            return
        if (part := part_of_gradient(tensor)) is not None:
            self._parts[id(part)] += 1
            self.of_a_part = Location.parse(call.location)
        if self._run.is_written(self._run.steps) and tensor.numel() > _FEW and len(self._given) < _MOST_GIVEN:
            if next(iter(self._run.watches), None) is None:  # gradients are averaged by hand
                self._given.append((tensor.numel(), fingerprint(tensor)))

    def backward_begins(self) -> None:
        if not self._began:
            self._began, self.before = True, self.largest
        self._largest = (0, "")

    @property
    def largest(self) -> Location | None:
        """The line of the largest collective of all ranks since the last backward pass: of gradients, perhaps."""
        return Location.parse(self._largest[1])

    def of(self, *gradients: list[torch.Tensor]) -> tuple[int, ...]:
        """Fingerprints, if they are of as many elements as some of these lists; small ones may be in buckets only."""
        sizes = [[gradient.numel() for gradient in some] for some in gradients]
        elements = {sum(size for size in some if size > least) for some in sizes for least in (0, _FEW)}
        return tuple(one for _, one in self._given) if sum(size for size, _ in self._given) in elements else ()

    def is_reduced(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter that this rank has for itself was given again and again."""
        return self._parts[id(parameter)] > 1
