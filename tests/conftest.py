"""Skips the tests of what an older torch does not have: `make test-torch VERSION=...` runs the others.

And takes the deadlines from those of hypothesis: no test asserts a time. And a width from the environment: readline has
set it in that of the workers of pytest-xdist, and lines would be broken there that are whole elsewhere.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
from collections.abc import Generator, Iterator
from importlib.metadata import version

import pytest

_OLDEST_WITH_ALL = (2, 13)

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # so that it sets them now, and not in the middle of a test
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

if importlib.util.find_spec("hypothesis") is not None:  # which a machine that has a GPU may do without
    from hypothesis import settings

    settings.register_profile("without deadlines", deadline=None)
    settings.load_profile("without deadlines")


def _lacking() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What this torch does not have, and parts of the names of the tests that need it."""
    import torch
    from torch.distributed import fsdp
    from torch.nn.parallel import DistributedDataParallel

    options = inspect.signature(DistributedDataParallel).parameters
    if "init_sync" not in options:
        yield "DDP(init_sync=...)", ("ranks/init_sync_off", "[values that differ]", "test_parameters_that_start_apart")
    if "forward_sync_buffers" not in options:
        yield "DDP(forward_sync_buffers=...)", ("ranks/forward_sync_buffers_off",)
    if importlib.util.find_spec("torch.distributed.flight_recorder") is None:
        yield "torch.distributed.flight_recorder", ("test_torchs_own_analysis",)
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        yield "a Flight Recorder of gloo", ("test_dumps_of_real_ranks", "leaves_for_the_flight_recorder")
    if not hasattr(fsdp, "fully_shard"):
        shards = ("what_is_compared_of_shards", "healthy_loops_of_shards", "a_script_is_found[sharded_")
        more = ("twin_is_clean[sharded_", "test_fully_shard_is_tried", "[fully_shard]", "collectives_of_fully_shard")
        yield "torch.distributed.fsdp.fully_shard", (*shards, *more)
    elif torch.__version__ < "2.9":  # gloo's AVG sums, and ddpcheck says so (DDP303); measured with 2.8.0
        by_name = (
            *("test_a_healthy_model_is_clean", "test_a_fault_is_told_by_its_own_rule", "test_parameters_after_a_step"),
            *(
                "test_an_optimizer_whose_hook",
                "test_a_parameter_that_no_rank_uses",
                "test_layers_that_wrap_re",
            ),
        )
        in_recipes = tuple(f"report/test_sharded_recipes.py::{name}" for name in by_name)
        yield "average in gloo's reduce_scatter: under fully_shard gradients are summed", in_recipes
        yield "average in gloo's reduce_scatter", ("what_is_compared_of_shards",)
    if torch.__version__ < "2.6":
        yield "support by transformers 5, which needs torch 2.6", ("integrations/test_transformers.py",)
    if not hasattr(torch, "float8_e8m0fnu"):
        yield "torch.float8_e8m0fnu", ("float8 scales",)
    if not hasattr(torch.ones(1, requires_grad=True).sum().grad_fn, "_input_metadata"):
        in_gathers = ("gathered_one_by_one_and_joined[2]", "own_part_that_is_put_back")
        yield "the shapes of a graph's nodes", (*in_gathers, "how_many_elements_a_mean_is_over")
    if not hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph"):
        second = ("pass_through_another_output_is_told", "test_of_three_backward_passes_the_one")
        yield "answer whether a graph is kept", ("test_a_hook_is_told_whether_the_graph_is_kept", *second)
    if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        yield "answer whether a tensor is packed", ("test_a_checkpoint_is_not_computed_again_to_know_them",)
    if "group_dst" not in inspect.signature(torch.distributed.send).parameters:
        yield "send(group_dst=...)", ("test_what_a_rank_waits_for_is_known_from_the_call",)
    if not hasattr(torch.compiler, "set_stance"):
        yield "torch.compiler.set_stance", ("test_a_detached_parameter_of_a_compiled_module_is_named_and_told",)
    if torch.__version__ < "2.5":
        yield "a gradient of torch.cond", ("test_in_a_check_compiled_code_runs_as_it_is_written",)
        yield "complex parameters under DDP", ("finding[complex_parameters]",)
        yield "functional collectives that write into a view", ("finding[functional_collectives]",)
        simulated = ("ranks_with_matching_collectives", "ranks_that_diverge_are_named", "raises_is_named_by_its_own")
        yield "constructor of DDP that a group written in Python can answer", simulated


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives to the end: garbage collection passes it over, which otherwise is half of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them, where torch is older than the one that has all."""
    if tuple(map(int, version("torch").split(".")[:2])) >= _OLDEST_WITH_ALL:
        return
    for what, tests in _lacking():
        skip = pytest.mark.skip(reason=f"this torch has no {what}")
        for item in items:
            if any(part in item.nodeid for part in tests):
                item.add_marker(skip)
