"""Track missing gradients, zeros and changes of parameters on one rank, and reports.

Also a detailed record of a step: gradients that arrive at parameters, other leaves with a gradient, and values of
`.grad`. A probe costs a hook per parameter and a walk of the graph, so only steps 0, 1, 2, 4, 8, 16, ... and steps
whose gradients are compared are probed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import GradientState, PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.gather.autograd.autograd_graph import LossGraph, gradient_nodes, named_parameters, unregistered_tensors
from ddpcheck.gather.autograd.gradient_paths import COMPILED_CODE, function_returning_none
from ddpcheck.gather.ddp.ddp_wrapper import SeenParameter, parameter_changes, parameters_in_wrappers
from ddpcheck.gather.ddp.sharding import is_gathered, shards_in_use, shards_of_tied_params
from ddpcheck.gather.state.fingerprints import fingerprint, is_dtensor, local_part
from ddpcheck.gather.state.module_description import KnownParts
from ddpcheck.gather.steps.gradient_distance import dense
from ddpcheck.record.loop.loop_record import Snapshot
from ddpcheck.record.parameters.hooked_gradients import HookedGradients
from ddpcheck.record.recording import remove_hooks
from ddpcheck.stream.rank_report import RankReport

_EXPLAINED_EARLY = 2  # step in which unused parameters are explained, in case the run ends early
_ZERO_FROM = 4  # first step in which always-zero gradients are reported


class ParameterHistory:
    """History of missing gradients, zero gradients and changes of one wrapper's parameters."""

    def __init__(
        self, rank: int, module: nn.Module, parameters: Mapping[str, nn.Parameter], wrapper: WrapperFacts
    ) -> None:
        # returns the context of a forward rerun that explains missing parameters
        self.around_replay: Callable[[], AbstractContextManager[Any]] = nullcontext
        # parameters that DDP waited for and no rank has reported yet, by step
        self.not_reported: dict[int, tuple[str, ...]] = {}
        self._rank = rank
        self._module = module
        self._parameters = parameters
        self._wrapper = wrapper
        self._start_params = SeenParameter.current_params(module.named_parameters())
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._has_noticed_unfrozen = False
        self._never_used = set(parameters)
        self._unreached: set[str] = set()  # not reached by the engine in a probed step
        self._sometimes_missing: set[str] = set()
        self._reported: set[str] = set()
        self._created_in_forward: set[str] = set()
        self._path_ends: dict[str, PathEnd] = {}
        self._zero_so_far = set(parameters)  # parameters whose gradient was zero in all probed steps
        self._first_fingerprints: dict[str, int] = {}  # first fingerprint of a parameter with a nonzero gradient

    def step_ended(
        self,
        step: int,
        probe: StepProbe | None,
        unused: frozenset[str],  # parameters that the last backward pass did not use, by the autograd engine
        awaited: frozenset[str],  # `unused` parameters that DDP has waited for
        accumulated: frozenset[str],  # parameters with gradients of earlier backward passes under `no_sync`
        late: frozenset[str] = frozenset(),  # `awaited` parameters that a second backward pass may reach
    ) -> None:
        if probe is not None:
            if self._wrapper.static_graph and step == 0:  # DDP will wait for these parameters
                awaited |= probe.unused - unused
            self._never_used &= probe.unused - accumulated
            self._sometimes_missing |= probe.unused
            self._unreached |= probe.unused & unused
        elif took_part := self._never_used & self._unreached - unused:
            self._never_used -= took_part
        if not awaited:
            return
        self._sometimes_missing |= awaited
        if not self.is_reported(awaited - late):
            self.not_reported[step] = self._in_order(awaited - late - self._reported)

    def left_out(self, step: int, names: Iterable[str], snapshot: Snapshot | None) -> None:
        """Record parameters found missing only after `step` ended, and find out why."""
        self.not_reported[step] = self._in_order({*names, *self.not_reported.get(step, ())})
        self._path_ends |= self._explain_missing(set(names) - self._path_ends.keys(), snapshot)

    def is_reported(self, names: Iterable[str]) -> bool:
        """Return True if reports have named all parameters in `names` as missing."""
        return self._reported.issuperset(names)

    def note_reported(self, reports: Iterable[RankReport]) -> None:
        """Record which missing parameters the exchanged reports have named."""
        self._reported |= {name for report in reports for names in report.missing.values() for name in names}
        self.not_reported = {}

    def report(
        self,
        step: int,  # the step that has just ended
        *,
        settled: bool,  # True to judge tolerated unused parameters now
        probe: StepProbe | None = None,
        snapshot: Snapshot | None = None,  # of the last forward pass
        thorough: bool = False,  # True to look for parameter changes without a probe, too
        parameters: Mapping[str, nn.Parameter] | None = None,  # current ones, if known
    ) -> RankReport:
        missing = {name for names in self.not_reported.values() for name in names} - self._reported
        if self._wrapper.continues_unused and (settled or step == _EXPLAINED_EARLY):
            missing |= self._never_used - self._reported
        self._path_ends |= self._explain_missing(missing - self._path_ends.keys(), snapshot)
        probed = StepEvidence(self._rank, step, {}) if probe is None else self._step_evidence(step, probe, snapshot)
        looks = probe is not None or thorough or missing or self._has_unfrozen()
        return RankReport(
            probed,
            missing=dict(self.not_reported),
            never_used=self._in_order(self._never_used),
            sometimes_missing=self._in_order(self._sometimes_missing),
            ends={name: self._path_ends[name] for name in missing if name in self._path_ends},
            changes=self.changed(parameters) if looks else {},
        )

    def notices_unfrozen(self) -> bool:
        """Return True the first time that a parameter frozen at construction requires grad."""
        was_noticed = self._has_noticed_unfrozen
        self._has_noticed_unfrozen = was_noticed or self._has_unfrozen()
        return self._has_noticed_unfrozen and not was_noticed

    def _has_unfrozen(self) -> bool:
        return any(parameter.requires_grad for parameter in self._frozen)

    def changed(self, parameters: Mapping[str, nn.Parameter] | None = None) -> dict[str, str]:
        """Return changes of parameters since wrapping, by name: "added", "replaced", ..."""
        changed = parameter_changes(self._start_params, self._module, parameters)
        if self._wrapper.sharded:  # `fully_shard` adopts other changes in the next forward pass
            changed = {name: kind for name, kind in changed.items() if kind in ("added", "replaced")}
            parameters = dict(self._module.named_parameters()) if changed else {}
            used = shards_in_use(self._module) if changed else set()
            if not used:  # gathered parameters are unknown, and may replace a shard temporarily
                gathered = (n for n in parameters if is_gathered(parameters[n], self._parameters.get(n)))
                unsharded = set(gathered) - self._wrapper.ignored
                changed = {name: kind for name, kind in changed.items() if name not in unsharded or kind == "added"}
            changed = {name: kind for name, kind in changed.items() if id(parameters[name]) not in used}
            changed = {n: kind for n, kind in changed.items() if kind == "added" or parameters[n].requires_grad}
        return {name: kind for name, kind in changed.items() if name not in self._created_in_forward}

    def _step_evidence(self, step: int, probe: StepProbe, snapshot: Snapshot | None) -> StepEvidence:
        self._created_in_forward |= probe.created_in_forward.keys()
        states: dict[str, GradientState] = dict.fromkeys(probe.lost, "lost")
        excused = probe.lost.keys() | self._sometimes_missing  # a missing gradient was replaced by zeros
        zero = self._always_zero(excused)
        if step >= _ZERO_FROM:
            states |= dict.fromkeys(self._in_order(zero), "zero")
        return StepEvidence(
            self._rank,
            step,
            states,
            path_ends=self._lost_gradients(probe, snapshot),
            unregistered=(*probe.unregistered, *probe.created_in_forward.values()),
            arrivals={name: count for name, count in probe.arrivals.items() if count > 1 and probe.reentrant},
            reentrant=probe.reentrant,
        )

    def _lost_gradients(self, probe: StepProbe, snapshot: Snapshot | None) -> dict[str, PathEnd]:
        """Return where backward lost gradients, by parameter; for compiled code, after an eager rerun."""
        compiled = {name for name, end in probe.lost.items() if end.reason == COMPILED_CODE}
        self._path_ends |= self._explain_missing(compiled - self._path_ends.keys(), snapshot)
        ends = {name: self._path_ends[name] for name in compiled & self._path_ends.keys()}
        return probe.lost | {name: end for name, end in ends.items() if end.cause != "unknown"}

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        wanted = set(names)
        return tuple(name for name in self._parameters if name in wanted)

    def _explain_missing(self, missing: set[str], snapshot: Snapshot | None) -> dict[str, PathEnd]:
        """Rerun forward to find why `missing` parameters have no gradient; `{}` without a snapshot."""
        if not missing or snapshot is None:
            return {}
        parameters = {name: p for name, p in named_parameters(self._module).items() if name in missing}
        return snapshot.explain(self._module, parameters, self.around_replay)

    def _always_zero(self, excused: Set[str]) -> set[str]:
        """Return parameters (except `excused`) whose gradient was always zero while another parameter changed."""
        if not self._zero_so_far:
            return set()
        zero_or_missing = zero_gradients(self._parameters) | excused
        self._zero_so_far &= zero_or_missing - excused
        if not self._zero_so_far:
            return set()
        moving = [name for name in self._parameters if name not in zero_or_missing][:1]
        current = {name: fingerprint(self._parameters[name]) for name in moving}
        self._first_fingerprints = self._first_fingerprints or current
        moved = any(self._first_fingerprints.get(name) != value for name, value in current.items())
        return self._zero_so_far if moved else set()


class StepProbe:
    """Recorder of one step's gradients, by hooks on each parameter."""

    def __init__(
        self,
        module: nn.Module,
        parts: KnownParts,
        parameters: Mapping[str, nn.Parameter],
        # tensors that backward accumulates into, by parameter; if known in forward only, `attach` is called again
        leaves: Sequence[torch.Tensor],
        *,
        keep: Callable[[str, torch.Tensor], Any] | None,
    ) -> None:
        """Register hooks for the step of `module` that begins."""
        self.arrivals: dict[str, int] = {}  # number of gradients that arrived, by parameter
        # parameters that backward reached without a gradient, with the Functions that may have returned None
        self.lost: dict[str, PathEnd] = {}
        # leaves with a gradient that the module holds, but not as parameters
        self.unregistered: tuple[UnregisteredTensor, ...] = ()
        self.created_in_forward: dict[str, UnregisteredTensor] = {}  # parameters that the forward pass has created
        self.reentrant = False  # True if a re-entrant checkpoint is in the graph
        # kept values of this rank's own gradients: `.grad` before plus arrivals; for shards, arrivals only
        self.local: dict[str, Any] = {}
        self.grads_before: dict[str, torch.Tensor] = {}  # of shards
        # shards whose gradient bypassed the reduction: by an operation on the DTensor itself, or as terms that torch
        # sums over tensor-parallel ranks before the reduction
        self.bypassing_shards: set[str] = set()
        self.hooked = HookedGradients()  # changes of gradients by program hooks, if gradients are kept
        self._module = module
        self._parts = parts
        self._parameters = parameters
        self._leaves = leaves
        self.keep = keep  # linear function of a gradient, by name, whose result is kept; `None` to keep nothing
        self._none_arrived: set[str] = set()
        self._known = parts.now().parameters
        self._graph: LossGraph | None = None  # of the forward outputs, if autograd Functions are in it
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Register hooks on the parameters that require grad now."""
        self.detach()
        nodes = gradient_nodes(self._leaves)
        self._handles = [  # on the node, since `torch.autograd.grad` also runs hooks on the tensor
            node.register_prehook(self._arrival_hook(name, leaf))
            for name, leaf, node in zip(self._parameters, self._leaves, nodes, strict=True)
            if node is not None
        ]
        for name, leaf in zip(self._parameters, self._leaves, strict=True) if self.keep is not None else ():
            self._handles += self.hooked.attach(name, leaf, self._keep_changed)
        for name, module in self._module.named_modules() if self.keep is not None else ():
            self._handles += self.hooked.attach_to_module(name or "(the model)", module)
        shards = {name: p for name, p in self._parameters.items() if self.keep and p.requires_grad and is_dtensor(p)}
        nodes = gradient_nodes([*shards.values()])  # run by the engine's accumulation, not by torch's reduction
        self._handles += [
            node.register_prehook(lambda _, name=name: self.bypassing_shards.add(name))
            for name, node in zip(shards, nodes, strict=True)
            if node is not None
        ]

    def detach(self) -> None:
        """Remove the hooks, since ddpcheck itself may add (zero) gradients later."""
        remove_hooks(self._handles)

    def _arrival_hook(self, name: str, leaf: Any) -> Any:
        def arrived(gradients: tuple[Any, ...]) -> None:
            (gradient,) = gradients
            if gradient is None:
                self._none_arrived.add(name)
                return
            self.arrivals[name] = self.arrivals.get(name, 0) + 1
            plain = type(gradient) is torch.Tensor and gradient.layout == torch.strided
            if not plain and is_dtensor(gradient) and gradient.placements != leaf.placements:
                self.bypassing_shards.add(name)  # under tensor parallelism
            if self.keep is not None:
                self.hooked.arrived(name, gradient)
                self._keep_earlier(name)
                value = self.keep(name, gradient.detach() if plain else dense(gradient))
                self.local[name] = self.local[name] + value if name in self.local else value

        return arrived

    def _keep_changed(self, name: str) -> None:
        """Keep `.grad` after the program's hooks, since DDP averages that value."""
        grad = self._parameters[name].grad
        if self.keep is not None and grad is not None and name in self.local and not is_dtensor(grad):
            self.local[name] = self.keep(name, dense(grad))

    def _keep_earlier(self, name: str) -> None:
        """Keep `.grad` of earlier backward passes without reduction, since DDP averages the accumulated sum."""
        grad = self._parameters[name].grad
        if name in self.local or name in self.grads_before or grad is None or self.keep is None:
            return
        if is_dtensor(grad):
            self.grads_before[name] = dense(grad).clone()
        else:
            self.local[name] = self.keep(name, dense(grad))

    def backward_begins(self) -> None:
        """Keep each `.grad` that exists already, e.g. of a parameter used outside of forward."""
        for name in self._parameters if self.keep is not None else ():
            self._keep_earlier(name)

    def forward_returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Find unregistered parameters and re-entrant checkpoints in forward's graph, while the graph exists."""
        graph = LossGraph(tensors)
        self.reentrant |= graph.has_reentrant_checkpoint
        self._graph = graph if graph.functions else None
        params = self._parts.now().parameters
        new = {} if params is self._known else {n: p for n, p in params.items() if n not in self._known}
        if new:
            gathered = shards_in_use(self._module)  # a shard with two names has two unsharded parameters
            self.created_in_forward |= {
                name: UnregisteredTensor(name, tuple(parameter.shape), created_in_forward=True)
                for name, parameter in new.items()
                if id(parameter) not in gathered
            }
            twice = shards_of_tied_params(self._module)
            self.bypassing_shards |= {name for name, p in self._parameters.items() if id(p) in twice}
        known_ids = {*map(id, params.values()), *map(id, self._leaves)}
        unknown = {id(leaf) for leaf in graph.leaves if leaf.requires_grad} - known_ids
        if unknown:
            names = {id(tensor): (name, tuple(tensor.shape)) for name, tensor in unregistered_tensors(self._module)}
            wanted = unknown - parameters_in_wrappers()
            self.unregistered = tuple(UnregisteredTensor(*names[key]) for key in names if key in wanted)

    def close(self) -> None:
        """Remove the hooks; find lost gradients: parameters at which only None arrived.

        Under `find_unused_parameters`, and in the first step under `static_graph`, DDP wraps the forward outputs in a
        Function. For an output outside of the loss, this Function returns None: no gradient is lost.
        """
        self.detach()
        graph, self._graph = self._graph or LossGraph([]), None
        leaves = dict(zip(self._parameters, self._leaves, strict=True))
        for name in sorted(self._none_arrived - self.arrivals.keys()):
            end = function_returning_none(graph, leaves[name])
            if _SINK not in end.reason:
                self.lost[name] = end

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(self._parameters.keys() - self.arrivals.keys() - self.lost.keys())


_SINK = "_DDPSink"  # in torch/nn/parallel/distributed.py; private to torch


def zero_gradients(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return names of the parameters whose gradient exists and is exactly zero."""
    gradients = {name: local_part(p.grad) for name, p in parameters.items() if p.grad is not None and p.numel()}
    values = [g.coalesce().values() if g.layout == torch.sparse_coo else g for g in gradients.values()]
    nonzero = torch.stack([value.ne(0).any() for value in values]).tolist() if values else []
    return {name for name, is_nonzero in zip(gradients, nonzero, strict=True) if not is_nonzero}
