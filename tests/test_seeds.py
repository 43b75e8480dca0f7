"""The five systems that ddpcheck grows from: each of their rows has a fault that is found, or a test that names it.

A row of PyTorch's own documentation is a fault of `examples/faults`, which `test_faults.py` runs with its healthy twin.
A row of the other systems is named in the docstring of a test: "Seed 2, it recurses ...".
"""

import ast
import functools
import re

import pytest

from tests.faultsuite.cases import FAULTS, ROOT, read_case

# What DistributedDataParallel only states in its documentation, the fault that breaks it, and the rule that tells.
PYTORCH = {
    "constructor, forward and differentiation are synchronisation points on every rank": {
        "training/inner_module_called_on_a_rank": "DDP501",
        "running/leaves_at_once": "DDP404",
    },
    "all parameters are registered before wrapping": {
        "training/added_after_wrapping": "DDP503",
        "parameters/created_in_first_forward": "DDP106",
    },
    "the same order on every rank": {"ranks/parameter_order": "DDP202"},
    "the same shape and dtype": {"ranks/parameter_shape": "DDP203", "ranks/dtype_half_types": "DDP204"},
    "the same strides": {"ranks/channels_last": "DDP205"},
    "requires_grad is the same and does not change": {
        "ranks/frozen_sets_differ": "DDP206",
        "training/frozen_after_wrapping": "DDP503",
        "training/unfrozen_after_wrapping": "DDP503",
    },
    "torch.autograd.grad bypasses the reducer": {"training/inner_loop_by_autograd_grad": "DDP501"},
    "forward of the wrapper is called, not of the module": {"training/inner_module_called": "DDP501"},
    "parameters are not replaced or moved after wrapping": {
        "training/replaced_after_wrapping": "DDP503",
        "training/cast_after_wrapping": "DDP503",
    },
    "every rank's optimizer makes the same update": {
        "ranks/learning_rate": "DDP223",
        "ranks/optimizer_class": "DDP223",
    },
    "buffers are rank 0's, or drift": {
        "ranks/moving_average_overwritten": "DDP215",
        "ranks/moving_average_drifts": "DDP214",
    },
    "every output takes part in the loss": {"parameters/output_not_in_loss": "DDP102"},
    "every parameter gets a gradient in every step on every rank": {
        "parameters/unused": "DDP101",
        "parameters/unused_on_one_rank": "DDP104",
        "parameters/alternating_heads": "DDP105",
    },
    "static_graph: the set of used parameters never changes": {"training/static_graph_violated": "DDP513"},
    "the same number of iterations on every rank": {"running/uneven_batches": "DDP405"},
    "hooks of the inner module, and what survives": {"gradients/clip_in_tensor_hook": "DDP310"},
    "marked ready twice": {"running/reentrant_checkpoint": "DDP406", "training/second_backward_not_reduced": "DDP509"},
    "a sum, or a mean over unequal counts, is not the global batch's loss": {
        "gradients/summed_loss": "DDP305",
        "gradients/unequal_shards": "DDP305",
    },
}

# Words that a docstring has for each row of the other systems.
NAMED = {
    1: [*("fork after CUDA", "one rank writes a checkpoint")],
    2: [
        *("train_step, val_step and test_step", "without gradient synchronisation", "what does not contribute"),
        *("handed a dict of losses", "recurses", "which of the two causes", "on which ranks or in which steps"),
        *("a full walk in each step", "is detached is not told", "all-zero gradient is not told"),
        *("not registered with the wrapper is not told", "drop-in"),
    ],
    3: [
        *("for launcher pytorch", "for launcher mpi", "for launcher slurm", "SyncBatchNorm when asked"),
        *("unknown kind", "wraps unless wrapped already", "own wrapper class", "saves a checkpoint"),
        *("checkpoint keeps rank 0's statistics",),
    ],
    4: [
        *("unknown launcher is a ValueError", "resolves the first host with scontrol", "MASTER_PORT is the argument"),
        *(r"get_dist_info gives \(0, 1\)", "master_only runs on rank 0 only", "coalesced", "nothing at world size 1"),
        *("gradients that are None", "`rank % num_gpus`", "fixed default port", "zero GPUs", "allreduce_params"),
        *("attaches to a world that torchrun", "attaches to a world that srun"),
        *("second, independent path for gradients",),
    ],
    5: [
        *("configure_ddp builds the wrapper", "init_ddp_connection", "moves the batch to the device"),
        *("unwraps the model", "sampler arguments", "data-parallel group", "optimizer state"),
        *("prepares and resets the reducer around a manual backward", "manual optimisation", "without entering it"),
    ],
}


@pytest.mark.parametrize("row", PYTORCH)
def test_what_ddp_only_documents_is_a_fault_that_is_found(row: str) -> None:
    for name, code in PYTORCH[row].items():
        case = read_case(FAULTS / f"{name}.py")
        assert case.expected.code == code
        twins = re.findall(r"^(?:def )?(broken|fixed)\b", case.path.read_text(encoding="utf-8"), re.MULTILINE)
        assert {*twins} == {"broken", "fixed"}


@functools.cache
def docstrings() -> list[str]:
    """Of all tests in files that name a seed."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    nodes = [node for text in texts if re.search(r"\bseed [1-5]\b", text, re.I) for node in ast.parse(text).body]
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [" ".join((ast.get_docstring(test) or "").split()) for test in tests]


@pytest.mark.parametrize(("seed", "words"), [(seed, words) for seed, rows in NAMED.items() for words in rows])
def test_each_row_of_the_other_systems_is_named_by_a_test(seed: int, words: str) -> None:
    named = [text for text in docstrings() if re.search(rf"\bseed {seed}\b.*{words}", text, re.IGNORECASE)]
    assert named, f"no test says 'Seed {seed} ... {words}'"
