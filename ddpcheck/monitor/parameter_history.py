"""What one rank knows of its parameters from round to round, and what of it the other ranks have not heard yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.ddp.ddp_wrapper import SeenParameter, changes
from ddpcheck.gather.state.module_description import fingerprint
from ddpcheck.monitor.forward_snapshot import Snapshot
from ddpcheck.monitor.rank_report import RankReport
from ddpcheck.monitor.step_probe import StepProbe, zero_gradients
from ddpcheck.monitor.step_tracker import differentiable_tensors

_ASKED_EARLY = 2  # the round from which is kept why a parameter never took part, for a run that ends before it is told
_ZERO_FROM = 4  # the round from which a gradient that was always zero is told


class ParameterHistory:
    """Absences, zeros and changes of the parameters of one wrapper.

    Attributes:
        around_replay: Makes the context in which a forward pass is run again to say why a parameter is missing.
        unheard: By round, what DDP waited for in it, as far as no rank has told of it before.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], wrapper: WrapperFacts) -> None:
        self.around_replay: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.unheard: dict[int, tuple[str, ...]] = {}
        self._module = module
        self._parameters = parameters
        self._wrapper = wrapper
        self._seen = {name: SeenParameter.of(p) for name, p in module.named_parameters()}
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._never = set(parameters)
        self._sometimes: set[str] = set()
        self._heard: set[str] = set()
        self._late: set[str] = set()
        self._ends: dict[str, PathEnd] = {}
        self._zero: set[str] | None = None
        self._start: dict[str, int] = {}

    def enter(self, number: int, look: StepProbe | None, absent: frozenset[str], lacking: frozenset[str]) -> None:
        """Note a round that has ended.

        Args:
            number: Of the round.
            look: At it, where there was one.
            absent: What had no part in it, as the engine tells.
            lacking: What DDP has waited for.
        """
        if look is not None:
            if self._wrapper.static_graph and number == 0:  # DDP takes them for used, and will wait for them
                lacking |= look.absent - absent
            self._never &= look.absent
            self._sometimes |= look.absent
        if not lacking:
            return
        self._sometimes |= lacking
        if not self.is_heard(lacking):
            self.unheard[number] = self._ordered(lacking - self._heard)

    def is_heard(self, names: Iterable[str]) -> bool:
        """Whether all ranks know of these that they are missing at times."""
        return self._heard.issuperset(names)

    def hear(self, accounts: Iterable[RankReport]) -> None:
        """Note what the ranks have told each other."""
        self._heard |= {name for account in accounts for names in account.absences.values() for name in names}
        self.unheard = {}

    def account(
        self,
        rank: int,
        number: int,
        look: StepProbe | None,
        snapshot: Snapshot | None,
        *,
        settled: bool,
        thorough: bool = False,
    ) -> RankReport:
        """What this rank tells when the ranks meet.

        Args:
            rank: This one.
            number: Of the round that has just ended.
            look: At it, where there was one.
            snapshot: Of its last forward.
            settled: Whether what an option allows for is to be judged now.
            thorough: Whether to look for changes of parameters without a look, too.
        """
        missing = {name for names in self.unheard.values() for name in names} - self._heard
        if self._wrapper.tolerates_unused and (settled or number == _ASKED_EARLY):
            missing |= self._never - self._heard
        self._ends |= self._explained(missing - self._ends.keys(), snapshot)
        known = RankReport(
            rank=rank,
            step=number,
            absences=dict(self.unheard),
            never=self._ordered(self._never),
            sometimes=self._ordered(self._sometimes),
            ends={name: self._ends[name] for name in missing if name in self._ends},
        )
        if look is not None:
            return self._with_look(known, look)
        return replace(known, changes=self._changed()) if thorough or missing or self.has_thawed() else known

    def has_thawed(self) -> bool:
        """Whether a parameter requires grad that did not when DDP was constructed."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def _changed(self) -> dict[str, str]:
        changed = changes(self._seen, self._module)
        return {name: how for name, how in changed.items() if name not in self._late}

    def _with_look(self, account: RankReport, look: StepProbe) -> RankReport:
        self._late |= look.late.keys()
        return replace(
            account,
            lost=look.lost,
            zero=self._always_zero(account.step, look),
            unregistered=(*look.unregistered, *look.late.values()),
            arrivals={name: count for name, count in look.arrivals.items() if count > 1 and look.reentrant},
            reentrant=look.reentrant,
            changes=self._changed(),
        )

    def _ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        wanted = set(names)
        return tuple(name for name in self._parameters if name in wanted)

    def _explained(self, missing: set[str], snapshot: Snapshot | None) -> dict[str, PathEnd]:
        """Why parameters are missing: this costs a forward pass, once for each of them."""
        parameters = {name: p for name, p in named_parameters(self._module).items() if name in missing}
        if not parameters or snapshot is None:
            return {}
        return snapshot.explain(self._module, parameters, differentiable_tensors, self.around_replay)

    def _always_zero(self, number: int, look: StepProbe) -> tuple[str, ...]:
        """The parameters whose gradient was zero in every look, once parameters have moved in between."""
        excused = look.lost.keys() | self._sometimes  # what is missing gets zeros
        nothing = zero_gradients(self._parameters) | excused
        zero = nothing - excused
        self._zero = zero if self._zero is None else self._zero & zero
        if not self._zero:
            return ()
        moving = [name for name in self._parameters if name not in nothing][:1]
        now = {name: fingerprint(self._parameters[name]) for name in moving}
        self._start = self._start or now
        moved = any(self._start.get(name) != value for name, value in now.items())
        return self._ordered(self._zero) if number >= _ZERO_FROM and moved else ()
