"""Record gradients of wrapped parameters from `torch.autograd.grad`, which bypass DDP's hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ddpcheck.findings.evidence.loop import GradientsTaken
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.steps.gradient_distance import dense, sketch
from ddpcheck.record.rank.script_watch import ScriptWatch
from ddpcheck.record.recording import Recording
from ddpcheck.stream.rank_report import is_probed

_MOST_MARKS = 1024
_MOST_PARAMETERS = 64  # compared parameters per call


@dataclass(slots=True)
class _Followed:
    names: dict[int, str]  # parameter names, by id()
    calls: int = 0
    marks: list[int] = field(default_factory=list)
    location: Location | None = None


class TakenRecorder(Recorder, subjects=("loop",)):
    """Recorder of sampled `torch.autograd.grad` results for wrapped parameters."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._known: WeakKeyDictionary[ScriptWatch, _Followed] = WeakKeyDictionary()

    def close(self) -> None:
        """Record the parameters at the end of the script."""
        for watch, followed in list(self._known.items()):
            if followed.calls and followed.location is not None:
                self._note(watch, followed, {}, followed.location)

    def taken(self, inputs: Any, gradients: Any) -> None:
        """Record `gradients` that `torch.autograd.grad` returned for `inputs`."""
        if not isinstance(inputs, tuple) or not isinstance(gradients, tuple):
            return
        pairs = [(p, g) for p, g in zip(inputs, gradients, strict=False) if isinstance(p, torch.nn.Parameter)]
        for watch in list(self._run.watches) if pairs else ():
            followed = self._known.get(watch)
            if followed is None:
                followed = self._known[watch] = _Followed({id(p): name for name, p in watch.parameters.items()})
            entries = [(followed.names[id(p)], p, g) for p, g in pairs if id(p) in followed.names]
            if not entries:
                continue
            if is_probed(followed.calls):
                grads = {name: g for name, _, g in entries[:_MOST_PARAMETERS] if type(g) is torch.Tensor}
                followed.location = user_location()
                self._note(watch, followed, grads, followed.location)
            elif len(followed.marks) < _MOST_MARKS and not watch.step:
                followed.marks.append(fingerprint(min((p for _, p, _ in entries), key=torch.Tensor.numel)))
            followed.calls += 1

    def _note(
        self, watch: ScriptWatch, one: _Followed, gradients: dict[str, torch.Tensor], where: Location | None
    ) -> None:
        params = dict(list(watch.parameters.items())[:_MOST_PARAMETERS])
        self._run.add(
            GradientsTaken(
                watch.number,
                one.calls,
                where,
                reductions=watch.step,
                put_off=watch.has_unreduced,
                gradients={name: tuple(sketch(dense(g.detach())).tolist()) for name, g in gradients.items()},
                parameters={name: fingerprint(p) for name, p in params.items()},
                marks=tuple(one.marks),
            )
        )
        one.marks.clear()
