"""Comparison of ranks that shard the same model over different meshes.

Each rank writes its state at the steps that its own mesh compares, and reads the earlier states of other meshes. If any
rank has no watch, or has a pipeline stage, nothing is compared.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by
from ddpcheck.gather.collectives.store_exchange import default_store
from ddpcheck.gather.ddp.sharding import mesh_of, shard_number
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import fingerprints
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.loop.loop_record import Snapshot, StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_separate_meshes
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.stream.rank_report import ReplicaState
from ddpcheck.worlds.wire import get_value, put_value, remove_value

_MOST_KEPT = 8  # max steps in the store; a mesh further behind is not compared
_Written = tuple[tuple[int, ...], bool, ReplicaCaptured]
"""(ranks of a mesh, True for a pipeline stage, state of one of the ranks)"""


class OtherMeshes(StepListener, Recorder, subjects=("replicas",)):
    """Comparison of shards between the n-th watches on different meshes."""

    def __init__(
        self,
        recorder: Callable[[], StepRecorder],
        is_due: Callable[[int], bool],
        tell: Callable[[Iterable[Finding]], object],
    ) -> None:
        """Initialize; `recorder` returns the watch's recorder, `is_due` selects the steps."""
        self._recorder = recorder
        self._is_due = is_due
        self._tell = tell
        self._number = 0
        self._looks: list[int] = []  # steps written by this rank

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Write this rank's state; compare the first and second-last written steps."""
        recorder = self._recorder()
        if not self._is_due(step) or not _misses_ranks(recorder):
            return
        inputs = tree_tensors((snapshot.arguments, snapshot.named)) if snapshot is not None else ()
        is_stage = any(tensor.requires_grad for tensor in inputs)  # its backward pass continues in another stage
        by_step: dict[int, list[_Written]] = {}
        with contextlib.suppress(RuntimeError):  # the process with the store has exited
            self._put(step, recorder, pickle.dumps((recorder.ranks, is_stage, _captured(recorder, step))))
            by_step = self._all_of([self._looks[0], self._looks[-2]] if len(self._looks) > 2 else [])
        if by_step and not any(stage for entries in by_step.values() for _, stage, _ in entries):
            groups = {key: group_by(entries, lambda entry: entry[0]) for key, entries in by_step.items()}
            states = {key: [[item for *_, item in mesh] for mesh in group.values()] for key, group in groups.items()}
            self._tell(judge_separate_meshes(list(groups[self._looks[0]]), states, None))

    def _put(self, step: int, recorder: StepRecorder, data: bytes) -> None:
        store = default_store()
        self._number = self._number or store.add(f"ddpcheck/meshes/calls/{recorder.rank}", 1)
        put_value(store.set, self._key(step, recorder.rank), data)
        self._looks.append(step)
        if len(self._looks) > _MOST_KEPT:
            remove_value(store.delete_key, self._key(self._looks.pop(1), recorder.rank))

    def _all_of(self, steps: Sequence[int]) -> dict[int, list[_Written]]:
        """Return all ranks' states at the given steps; empty if any is missing."""
        store, ranks = default_store(), range(dist.get_world_size())
        if not steps or not store.check([self._key(step, rank) for step in steps for rank in ranks]):
            return {}
        return {step: [pickle.loads(get_value(store.get, self._key(step, rank))) for rank in ranks] for step in steps}

    def _key(self, step: int, rank: int) -> str:
        return f"ddpcheck/meshes/{self._number}/{step}/{rank}"


def _misses_ranks(recorder: StepRecorder) -> bool:
    """Return True if the mesh omits ranks, other than for tensor parallelism."""
    if not recorder.is_sharded or len(recorder.ranks) == dist.get_world_size():
        return False
    mesh = mesh_of(recorder.module)
    shards: Iterable[Any] = recorder.parameters.values()
    return all(shard.device_mesh.ndim == mesh.ndim for shard in shards)


def _captured(recorder: StepRecorder, step: int) -> ReplicaCaptured:
    mesh = mesh_of(recorder.module)
    number = next(shard_number(shard, mesh) for shard in recorder.parameters.values())
    values = DdpStepEvidence(recorder.rank, step, parameters=fingerprints(recorder.parameters.items()))
    return ReplicaCaptured(0, step, ReplicaState(ModuleDescription(), values), shard=number)
