"""What torch raises in a script, told by what is behind it: judged on failures made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.modules import ModuleDescription, ShardedFacts, TensorRecord
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import Names
from ddpcheck.rules.collectives.diagnose import diagnose, diagnose_dumps, explain_by_torch_error
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, WrapperMade
from ddpcheck.stream.rank_report import WatchContext
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.trace.wait_graph import GroupLogs, RanksSeen
from tests.reports import assert_says

LINE = "train.py:30"


def raised(rank: int, text: str, *, when: float = 0.0, traceback: str = "") -> RankFailure:
    message = f"rank {rank} raised RuntimeError: {text}"
    return RankFailure(rank, "raised", message, when, type="RuntimeError", traceback=traceback, location=LINE)


def calls(*operations: str) -> list[Call]:
    return [Call(one, "0", (0, 1), location=f"train.py:{number}") for number, one in enumerate(operations, 20)]


STEP = (DDP_FORWARD, DDP_BACKWARD)


def wrapper(parameters: Sequence[tuple[int, ...]], buffers: Sequence[tuple[int, ...]], **options: str) -> WrapperBegun:
    p, b = (
        tuple(TensorRecord(f"{name}{n}", shape, "float32", (), True, "cpu") for n, shape in enumerate(shapes))
        for name, shapes in (("weight", parameters), ("buffer", buffers))
    )
    return WrapperBegun("Net", (0, 1), ModuleDescription(p, b), options)


def failing(
    text: str, log: Sequence[str] = STEP, *begun: WrapperBegun, traceback: str = "", **more: Any
) -> FailureFacts:
    return FailureFacts([raised(0, text, traceback=traceback), raised(1, text)], [calls(*log)] * 2, begun=begun, **more)


def mixed(**policies: str) -> FailureFacts:
    """Operands of two dtypes under fully_shard with these policies."""
    shards = ShardedFacts(policies={name.replace("__", " of "): policy for name, policy in policies.items()})
    context = WatchContext(Names({}), shards, 2, sharded=shards)
    made = WrapperMade("Net", (0, 1), context, Location("train.py", 9), by_library=False, classes={})
    return failing("mat1 and mat2 must have the same dtype, but got Float and BFloat16", (), sharded=[made])


READY = "Expected to mark a variable ready only once."
NET, SMALL = wrapper([(8, 4), (8,), (4,)], []), wrapper([(8, 4)], [(8,)])
AT_LAYER = replace(NET, lines={"weight1": Location("net.py", 7)})
REVERSED = replace(NET, description=ModuleDescription(NET.description.parameters[::-1]))
UNREDUCED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
    "Parameter indices which did not receive grad for rank 0: 1 2 In addition, you can set"
)
IN_PLACE = "modified by an inplace operation: [torch.FloatTensor [8]] is at version 3"
NORM = "aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
CLIP = "torch/nn/utils/clip_grad.py"
KINDS = ("gate.weight", "up.weight"), ("norm.weight",)
ADDMM = "aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all"
COPY = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert all"
UNDEFINED = "Encountered gradient which is undefined, but still allreduced by DDP reducer."
IN_CHECKPOINT = {"traceback": "torch/utils/checkpoint.py", "checkpoint": Location("net.py", 7)}
ADD = "aten.add_.Tensor got mixed torch.Tensor and DTensor, need to convert all"
IN_STEP = 'File "train.py", line 9, in main\n  File "torch/optim/adam.py", line 223, in step\n'
IN_CLOSURE = f'{IN_STEP}  File "torch/nn/functional.py", line 3, in linear\n'
LOST, INSIDE = "'Parameter' object has no attribute '_local_tensor'", "fsdp/_fully_shard/_fsdp_param.py"
ASSIGNED = [ModuleChanged(0, "replaced", "head.weight", ("head.weight",), Location("train.py", 9))]
IN_BFLOAT16 = "param_dtype=torch.bfloat16"
WAITED = raised(1, "Timed out waiting 4000ms for recv operation to complete.", when=10.0)
CLOSED = raised(0, "Connection closed by peer", when=15.0)
LOGS = [calls(*STEP, *STEP)] * 2
BEHIND = [LOGS[0][:-1], LOGS[0]]
WORKING = {0: ("evaluate.py:7", "train.py:40")}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (FailureFacts([], []), ""),
        (FailureFacts([raised(0, "CUDA out of memory")], [calls(*STEP)] * 2), ""),
        (failing(READY), "DDP406"),
        (failing(READY, **IN_CHECKPOINT), "DDP406 ... at net.py:7 ... use_reentrant=False"),
        (failing(READY, (DDP_FORWARD, *STEP)), "DDP406 ... was called 2 times"),
        (failing(READY, STEP, wrapper([], [], find_unused_parameters="True")), "DDP406 ... outside of forward"),
        (failing(UNDEFINED), "DDP509 ... ('backward',)"),
        (failing(NORM, (), traceback=CLIP, clipped=KINDS), "DDP521 ... ('gate.weight', 'up.weight') ... norm.weight"),
        (failing(NORM, (), traceback=CLIP), "DDP521 ... ('gradients',)"),
        (failing(UNREDUCED, STEP, AT_LAYER), "DDP101 ... at net.py:7 ... raised at train.py:30"),
        (failing(UNREDUCED, STEP, NET, REVERSED), "DDP101 ... ('parameters',)"),  # of one of two wrappers
        (failing(UNREDUCED, STEP, NET, wrapper([(8, 4)], [])), "DDP101 ... ('weight1', 'weight2') ... at train.py:30"),
        (failing(IN_PLACE, (DDP_FORWARD, *STEP), SMALL), "DDP311 ... ('buffer0',) ... broadcast_buffers"),
        (failing(IN_PLACE, STEP, SMALL), "DDP311 ... not broadcasts"),
        (failing(IN_PLACE.replace("[8]", "[4, 8]"), STEP, SMALL), "DDP311 ... ('weight0',) ... optimizer's step"),
        (failing("Your training graph has changed in this iteration"), "DDP513"),
        (failing(ADDMM, ("all_gather_single",)), "DDP501 ... at train.py:30 ... register_fsdp_forward_method"),
        (failing(ADDMM, (), traceback=IN_CLOSURE), "DDP501"),
        (failing(ADDMM, (), replace(wrapper([], []), location=Location.parse(LINE))), "DDP401 ... DTensor parameters"),
        (failing(ADD, (), traceback=IN_STEP), "DDP521 ... ('state',) ... set_optimizer_state_dict"),
        (failing(COPY, ()), "DDP521 ... at train.py:30 ... set_model_state"),
        (failing(LOST, (), traceback=f"{INSIDE} load_state_dict"), "DDP521 ... set_model_state_dict"),
        (failing(LOST, (), traceback=INSIDE, replaced=ASSIGNED), "DDP503 ... ('head.weight',) ... at train.py:9"),
        (failing(LOST, (), traceback=INSIDE), "DDP503 ... at train.py:30"),
        (FailureFacts([raised(0, LOST)], [calls()] * 2), ""),  # of the script's own
        (mixed(mp_policy=f"({IN_BFLOAT16}, cast_forward_inputs=False)"), "DDP401 ... at train.py:9 ... are not cast"),
        (mixed(mp_policy=f"({IN_BFLOAT16}, output_dtype=torch.float32)"), "DDP401 ... are cast to output_dtype"),
        (mixed(mp_policy="()", mp_policy__block=f"({IN_BFLOAT16})"), "DDP401 ... every part has the same"),
        (mixed(mp_policy=f"({IN_BFLOAT16})"), "DDP401 ... created in forward"),
        (mixed(), ""),
        (FailureFacts([WAITED, CLOSED], LOGS), "DDP402 ... of ranks (0,) ... came to it 5 s after"),
        (FailureFacts([WAITED], BEHIND, at_work=WORKING), "DDP402 ... at evaluate.py:7 ... still at work"),
        (FailureFacts([WAITED], BEHIND), ""),  # it may wait elsewhere
        (FailureFacts([WAITED, CLOSED], [calls("barrier"), LOGS[0]]), ""),  # another collective
        (FailureFacts([WAITED, CLOSED], BEHIND), ""),  # it has never come to it
    ],
)
def test_what_torch_raises_is_explained(facts: FailureFacts, words: str) -> None:
    assert_says(explain_by_torch_error(facts), words)


def test_calls_that_do_not_match_without_a_failure() -> None:
    logs = [calls("all_reduce"), calls("broadcast")]
    assert_says(diagnose(FailureFacts([], logs, [0, 1])), "DDP403 ... no rank failed")
    group = GroupLogs("world", (0, 1), 0, logs, frozenset({0, 1}))
    assert_says(diagnose_dumps([group], {0: "waits", 1: "waits"}, RanksSeen({})), "DDP403")
