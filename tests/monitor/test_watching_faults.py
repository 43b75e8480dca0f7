"""The faults of `examples/faults` that a wrapper can see, in a plain loop under `CheckedDistributedDataParallel`.

Each is found by its own rule while the loop runs, nobody hangs, and the healthy twin is silent.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.monitor.wrapper import CheckedDistributedDataParallel
from ddpcheck.recipe.pytree import tree_tensors
from tests.faultsuite.cases import all_cases
from tests.faultsuite.selection import fastest_of_each_code
from tests.tiers import one_of, share

FAULTS = Path(__file__).parents[2] / "examples" / "faults"
STEPS = 10

# What a wrapper cannot see, and why.
UNSEEN = {
    "criterion_with_parameters": "the criterion is in no module of the wrapper",
    "global_scale": "it looks for what its module holds, and this is a global variable",
    "lazy_module": "DDP's constructor refuses it, after it has been told",
    "sparse_embedding_unused_with_find_unused": "DDP raises in backward, before anything can be told",
}
OF_THE_LOOP = (
    *("added_after_wrapping", "always_no_sync", "backward_twice_through_one_forward", "cast_after_wrapping"),
    *("comm_hook_forgets_division", "comm_hook_overflows", "comm_hook_returns_local", "frozen_after_wrapping"),
    *("last_micro_batch_not_synchronised", "functional_call", "inner_loop_by_autograd_grad", "inner_module_called"),
    *("no_sync_around_backward_only", "no_sync_not_entered", "other_method_called", "replaced_after_wrapping"),
    *("second_backward_not_reduced", "static_graph_violated", "submodules_called", "unfrozen_after_wrapping"),
)
CASES = [path.stem for path in sorted((FAULTS / "parameters").glob("*.py")) if path.stem not in UNSEEN]


def load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: Path, which: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Train by the recipe, wrapped as it wraps; what was told, above notes: code, severity and subjects."""
    told = []

    class Wrapper(CheckedDistributedDataParallel):
        def __init__(self, *args, **kwargs):
            checks = {"check_consistency": 1, "check_parity_every": 1, "check_timeout": 20}
            super().__init__(*args, **checks, on_finding=told.append, **kwargs)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A recipe may wrap by itself, under the name that it has imported.
    with pytest.MonkeyPatch.context() as patch:
        for holder in (nn.parallel, nn.parallel.distributed):
            patch.setattr(holder, "DistributedDataParallel", Wrapper)
        recipe = getattr(load(path, f"{path.stem}_{which}"), which)
        torch.manual_seed(0)
        model = recipe.wrap_module(recipe.build_model(), torch.device("cpu"))
        optimizer = recipe.build_optimizer(p for p in model.parameters() if p.requires_grad)
        try:
            for step in range(STEPS):
                batch = recipe.local_batch(recipe.batch(step), rank, world_size)
                torch.manual_seed(100 * step + rank)
                optimizer.zero_grad()
                sum(part.sum() for part in tree_tensors(recipe.loss(model, batch))).backward()
                optimizer.step()
        except RuntimeError as error:  # DDP's own, after we have spoken
            if not told:
                raise
            assert "DDP" in str(error) or "ready only once" in str(error)
    return [(f.code, f.severity.value, f.subjects) for f in told if f.severity.value != "note"]


def both(path: Path) -> dict[str, list[tuple[str, str, tuple[str, ...]]]]:
    return {which: run(path, which) for which in ("fixed", "broken")}


NAMES = [*(f"parameters/{case}" for case in CASES), *(f"training/{case}" for case in OF_THE_LOOP)]
# `make test` has the fastest of every fourth code; whole checks have each.
QUICK = [str(case) for case in fastest_of_each_code([case for case in all_cases() if str(case) in NAMES])][::8]


@pytest.mark.ddp(preload=["ddpcheck.monitor.wrapper"], reuse="module")  # imported once, and not on each rank
@pytest.mark.parametrize("name", share([*QUICK, *(name for name in one_of(6, NAMES) if name not in QUICK)], QUICK))
def test_a_fault_is_found_while_the_loop_runs_and_its_twin_is_silent(ddp_world, name):
    path = FAULTS / f"{name}.py"
    want = load(path, path.stem).EXPECT
    for told in ddp_world.run(both, path):
        assert told["fixed"] == []
        if want["severity"] == "note":
            continue
        found = [subjects for code, _, subjects in told["broken"] if code == want["code"]]
        assert found, f"{want['code']} is not among {told['broken']}"
        if name.startswith("parameters/"):
            assert set(want["subjects"]) & {subject for subjects in found for subject in subjects}
