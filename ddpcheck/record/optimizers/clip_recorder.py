"""What happens to gradients between backward passes: clips, and whatever else changes them before the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from ddpcheck.findings.evidence.gradient_changes import GradientsChanged
from ddpcheck.findings.evidence.script import GradientsClipped
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import patched
from ddpcheck.gather.state.tensor_rows import InRows, in_rows
from ddpcheck.gather.steps.gradient_distance import norms
from ddpcheck.record.rank.script_watch import ScriptWatch

_WITH_NORM = "_clip_grads_with_norm_"  # private to torch; what clip_grad_norm_ calls, however it was imported
_SAME = 1e-4


class ClipRecorder:
    """Follows clips, and in some steps the norm of all gradients from one backward pass to the next."""

    def __init__(
        self,
        sink: Callable[[GradientsClipped | GradientsChanged], object],
        watches: Iterable[ScriptWatch],
        is_written: Callable[[int], bool],
        after: Callable[[], object],
    ) -> None:
        """Begin; `is_written` says whether the step or clip of a number is, `after` is called after each clip."""
        self.step = 0  # of all optimizers
        self._sink = sink
        self._watches = watches
        self._is_written = is_written
        self._after = after
        self._clips = 0
        self._last: tuple[str, Location | None] = ("", None)
        self._line: Location | None = None  # of the last backward pass
        self._norms: dict[int, float] = {}  # by number of a wrapper, as backward has left them
        known = hasattr(clip_grad, _WITH_NORM)
        patched(clip_grad if known else nn.utils, _WITH_NORM if known else "clip_grad_norm_", self._clips_norm)
        patched(nn.utils, "clip_grad_value_", self._clips_value)

    def _clips_norm(self, *arguments: Any, **named: Any) -> Generator[None, Any, None]:
        norm = _norm_given(arguments, named)
        result = yield
        limit = named["max_norm"] if "max_norm" in named else arguments[1]
        self._clipped("clip_grad_norm_", result if norm is None else norm, limit)

    def _clips_value(self, *arguments: Any, **named: Any) -> Iterator[None]:
        given = arguments[0] if arguments else named.get("parameters")
        is_list = isinstance(given, torch.Tensor | list | tuple)
        norm = _norm(given) if is_list and self._is_written(self._clips) else None
        yield
        self._clipped("clip_grad_value_", norm)

    def _clipped(self, name: str, norm: Any, limit: Any = 0.0) -> None:
        if norm is math.inf:
            return
        self._last = name, user_location()
        if type(norm) in (torch.Tensor, float) and self._is_written(self._clips) and not math.isnan(norm):
            self._sink(GradientsClipped(self._clips, float(norm), self._last[1], self.step, name, float(limit)))
        self._clips += 1
        self._after()

    def backward_begins(self) -> None:
        """A backward pass of the script begins: what have gradients become since the last one?"""
        known, self._norms = self._norms, {}
        here = user_location() if known else None
        for watch in list(self._watches) if known else ():
            before = known.get(watch.number)
            if before is None:
                continue
            now = _norm(watch.parameters.values()) or 0.0
            if 0.0 < now < math.inf and abs(now - before) > _SAME * before:
                name, where = self._last
                put_off = watch.has_unreduced
                if put_off or here == self._line:  # else the next loss may be of other parameters
                    self._sink(GradientsChanged(watch.number, self.step, name, now / before, where or here, put_off))
        self._last = "", None

    def backward_ended(self) -> None:
        """It has ended."""
        if not self._is_written(self.step):
            return
        self._line = user_location()
        for watch in list(self._watches):
            norm = _norm(watch.parameters.values(), watch.reduced_gradients)
            if norm is not None and 0.0 < norm < math.inf:
                self._norms[watch.number] = norm

    def steps(self, count: int) -> None:
        """An optimizer is about to make the last of so many steps: what comes now is no change on the way to it."""
        self.step, self._norms, self._last = count, {}, ("", None)


def _norm_given(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
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
