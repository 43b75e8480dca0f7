"""Comparison of ranks of a tensor parallel model over the store, without waiting.

Each rank writes its state before optimizer steps, and judges the steps before its last one: the forward pass since then
has synchronized the ranks, so that the same steps are available on all ranks.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import Evaluated, Inputs
from ddpcheck.findings.report import Finding
from ddpcheck.gather.collectives.store_exchange import default_store
from ddpcheck.gather.ddp.model_parts import parts_in_use, split_over
from ddpcheck.gather.patching import Recorder
from ddpcheck.record.data.datasets import InputRecorder
from ddpcheck.record.loop.loop_record import Snapshot, StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.optimizers.part_recorder import PartRecorder
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_model_batches
from ddpcheck.rules.replicas.model_parts import judge_model_parts
from ddpcheck.worlds.wire import get_value, put_value, remove_value

_FEWEST = 3  # min steps to judge
_MOST_KEPT = 8  # max steps in the store
_Written = tuple[PartStep, Inputs | None]


class ModelParts(StepListener, Recorder, subjects=("replicas",)):
    """Comparison of the ranks of a tensor parallel model, n-th instance by instance."""

    def __init__(
        self, recorder: Callable[[], StepRecorder], every: int, report: Callable[[Iterable[Finding]], object]
    ) -> None:
        """Initialize; `recorder` returns the model's recorder, `every`: optimizer steps between comparisons."""
        self._recorder = recorder
        self._report = report
        self._number = 0
        self._parts = PartRecorder(self._take, [self], every)
        self._inputs = InputRecorder(self._take, 0, tuple)
        self._inputs_of_forward: Inputs | None = None  # of the last one
        self._split: ModelSplit | None = None
        self._paths: dict[int, str] | None = None  # module paths by id, set after a step
        self._written = 0
        self._read: dict[int, list[list[_Written]]] = {}  # steps with the entries of all ranks, by optimizer

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._recorder().parameters

    @property
    def is_sharded(self) -> bool:
        return self._recorder().is_sharded

    def path_of(self, module: nn.Module) -> str | None:
        return (self._paths or {}).get(id(module))

    def close(self) -> None:
        self._parts.close()

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Detect split modules once; record the inputs of the last forward pass."""
        if self._paths is None:
            self._begin()
        if self._split is not None and snapshot is not None:
            self._inputs.trained(step, (snapshot.arguments, snapshot.named), None)

    def _begin(self) -> None:
        module = self._recorder().module
        self._paths = {id(part): path for path, part in module.named_modules()}
        split: dict[nn.Module, list[str]] = {}
        ranks: set[int] = set()
        for part, own_parts in parts_in_use(module).items():
            if ranks_by_param := split_over(module, own_parts):
                split[part] = list(ranks_by_param)
                ranks.update(*ranks_by_param.values())
        if ranks:
            self._parts.note_layouts(module.modules())
            self._parts.split(tuple(sorted(ranks)), split, None)

    def _take(self, entry: ModelSplit | PartStep | Inputs | Evaluated) -> None:
        if isinstance(entry, ModelSplit):
            self._split = entry
        elif isinstance(entry, Inputs):
            self._inputs_of_forward = entry
        elif isinstance(entry, PartStep) and not self.parameters.keys().isdisjoint(entry.norms):
            inputs, self._inputs_of_forward = self._inputs_of_forward, None
            with contextlib.suppress(RuntimeError):  # the process with the store has exited
                self._exchange(entry, inputs)

    def _exchange(self, step: PartStep, inputs: Inputs | None) -> None:
        store, split = default_store(), self._split
        if split is None:
            return
        rank = self._recorder().rank
        self._number = self._number or store.add(f"ddpcheck/parts/calls/{rank}", 1)
        put_value(store.set, self._key(self._written, rank), pickle.dumps((step, inputs)))
        if self._written >= _MOST_KEPT:
            remove_value(store.delete_key, self._key(self._written - _MOST_KEPT, rank))
        last, self._written = self._written - 1, self._written + 1
        if last < 0 or not store.check([self._key(last, peer) for peer in split.ranks]):
            return
        entries = [pickle.loads(get_value(store.get, self._key(last, peer))) for peer in split.ranks]
        if len({(part_step.optimizer, part_step.count) for part_step, _ in entries}) == 1:
            steps = self._read.setdefault(entries[0][0].optimizer, [])
            steps.append(entries)
            if len(steps) >= _FEWEST:
                self._report(_judge(steps, split))

    def _key(self, number: int, rank: int) -> str:
        return f"ddpcheck/parts/{self._number}/{number}/{rank}"


def _judge(steps: list[list[_Written]], split: ModelSplit) -> list[Finding]:
    parts = [[step for step, _ in entries] for entries in steps]
    inputs = [[batch for _, batch in entries if batch is not None] for entries in zip(*steps, strict=True)]
    if any(step.parts_given for entries in parts for step in entries):
        inputs = []
    findings = judge_model_batches([[] for _ in split.ranks], inputs, split.ranks, split)
    return findings or judge_model_parts(parts, split.ranks, split, wrapped=True)
