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


def judged(text: str, log: Sequence[str] = STEP, *begun: WrapperBegun, **more: Any) -> Any:
    failures = [raised(rank, text, traceback=more.pop("traceback", "")) for rank in (0,)]
    (found,) = explain_by_torch_error(
        FailureFacts([*failures, raised(1, text)], [calls(*log)] * 2, begun=begun, **more)
    )
    return found


def test_a_gradient_that_comes_twice() -> None:
    text = "Expected to mark a variable ready only once."
    checkpointed = judged(text, STEP, traceback="torch/utils/checkpoint.py", checkpoint=Location("net.py", 7))
    assert checkpointed.code == "DDP406" and checkpointed.location == Location("net.py", 7)
    assert "use_reentrant=False" in checkpointed.what_to_do
    assert "was called 2 times" in judged(text, (DDP_FORWARD, DDP_FORWARD, DDP_BACKWARD)).message
    assert "outside of forward" in judged(text, STEP, wrapper([], [], find_unused_parameters="True")).message
    assert judged(text).code == "DDP406"


def test_a_gradient_that_has_come_after_the_reduction() -> None:
    finding = judged("Encountered gradient which is undefined, but still allreduced by DDP reducer.")
    assert (finding.code, finding.subjects) == ("DDP509", ("backward",))


def test_one_norm_of_shards_and_whole_gradients_names_both() -> None:
    text = "aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    kinds = ("ff.gate.weight", "ff.up.weight"), ("norm.weight",)
    found = judged(text, (), traceback="torch/nn/utils/clip_grad.py", clipped=kinds)
    assert (found.code, found.subjects, str(found.location)) == ("DDP521", kinds[0], LINE)
    assert all(name in found.message for names in kinds for name in names) and "fully_shard" not in found.what_to_do
    assert judged(text, (), traceback="torch/nn/utils/clip_grad.py").subjects == ("gradients",)


def test_gradients_that_have_not_come() -> None:
    text = (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "Parameter indices which did not receive grad for rank 0: 1 2 In addition, you can set"
    )
    net = wrapper([(8, 4), (8,), (4,)], [])
    finding = judged(text, STEP, net)
    assert (finding.code, finding.subjects) == ("DDP101", ("weight1", "weight2"))
    assert str(finding.location) == LINE
    made = replace(net, lines={"weight1": Location("net.py", 7)})
    assert judged(text, STEP, made).location == Location("net.py", 7)
    assert [*map(str, judged(text, STEP, made).related)] == [f"raised at {LINE}"]
    other = replace(net, description=ModuleDescription(net.description.parameters[::-1]))
    assert judged(text, STEP, net, other).subjects == ("parameters",)  # of one of two wrappers
    assert judged(text, STEP, net, wrapper([(8, 4)], [])).subjects == ("weight1", "weight2")


def test_what_backward_needs_and_was_overwritten() -> None:
    text = "modified by an inplace operation: [torch.FloatTensor [8]] is at version 3"
    twice = (DDP_FORWARD, DDP_FORWARD, DDP_BACKWARD)
    finding = judged(text, twice, wrapper([(8, 4)], [(8,)]))
    assert (finding.code, finding.subjects) == ("DDP311", ("buffer0",)) and "broadcast_buffers" in finding.what_to_do
    assert "broadcasts" not in judged(text, STEP, wrapper([(8, 4)], [(8,)])).message
    finding = judged(text.replace("[8]", "[4, 8]"), STEP, wrapper([(8, 4)], [(8,)]))
    assert finding.subjects == ("weight0",) and "optimizer's step" in finding.message


def test_a_graph_that_static_graph_forbids() -> None:
    assert judged("Your training graph has changed in this iteration").code == "DDP513"


def test_an_operation_on_a_shard_is_one_outside_of_forward() -> None:
    found = judged("aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all", ("all_gather_single",))
    assert (found.code, found.location) == ("DDP501", Location.parse(LINE))
    assert "register_fsdp_forward_method" in found.what_to_do


def test_the_state_of_an_optimizer_that_is_not_in_shards() -> None:
    steps = 'File "train.py", line 9, in main\n  File "torch/optim/adam.py", line 223, in step\n'
    found = judged("aten.add_.Tensor got mixed torch.Tensor and DTensor, need to convert all", (), traceback=steps)
    assert (found.code, found.subjects) == ("DDP521", ("state",)) and "set_optimizer_state_dict" in found.what_to_do
    closure = f'{steps}  File "torch/nn/functional.py", line 3, in linear\n'
    assert judged("aten.addmm.default got mixed torch.Tensor and DTensor", (), traceback=closure).code == "DDP501"


def test_whole_tensors_that_are_given_to_shards_are_no_call_past_forward() -> None:
    mixed = "aten.copy_.default got mixed torch.Tensor and DTensor, need to convert all"
    lost, inside = "'Parameter' object has no attribute '_local_tensor'", "fsdp/_fully_shard/_fsdp_param.py"
    for text, traceback in ((mixed, ""), (mixed, "load_state_dict"), (lost, f"{inside} load_state_dict")):
        found = judged(text, (), traceback=traceback)
        assert (found.code, found.location) == ("DDP521", Location.parse(LINE))
        assert "set_model_state_dict" in found.what_to_do
    assigned = ModuleChanged(0, "replaced", "head.weight", ("head.weight",), Location("train.py", 9))
    found = judged(lost, (), traceback=inside, replaced=[assigned])
    assert (found.code, found.subjects, found.location) == ("DDP503", ("head.weight",), Location("train.py", 9))
    assert [*map(str, found.related)] == [f"raised at {LINE}"]
    assert str(judged(lost, (), traceback=inside).location) == LINE
    assert not explain_by_torch_error(FailureFacts([raised(0, lost)], [calls()] * 2))  # of the script's own


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ({"mp_policy": "(param_dtype=torch.bfloat16, cast_forward_inputs=False)"}, "its inputs are not cast"),
        ({"mp_policy": "(param_dtype=torch.bfloat16, output_dtype=torch.float32)"}, "are cast to output_dtype"),
        ({"mp_policy": "()", "mp_policy of block": "(param_dtype=torch.bfloat16)"}, "not every part has the same"),
        ({"mp_policy": "(param_dtype=torch.bfloat16)"}, "created in forward"),
    ],
)
def test_a_layer_that_gets_another_dtype_than_its_parameters(policies: dict[str, str], words: str) -> None:
    def made(facts: ShardedFacts) -> WrapperMade:
        context = WatchContext(Names({}), facts, 2, sharded=facts)
        return WrapperMade("Net", (0, 1), context, Location("train.py", 9), by_library=False, classes={})

    text = "mat1 and mat2 must have the same dtype, but got Float and BFloat16"
    found = judged(text, (), sharded=[made(ShardedFacts(policies=policies))])
    assert (found.code, found.location) == ("DDP401", Location("train.py", 9)) and words in found.message
    assert not explain_by_torch_error(FailureFacts([raised(0, text)], [calls()] * 2, sharded=[made(ShardedFacts())]))


def test_a_timeout_that_is_shorter_than_the_work_of_a_rank() -> None:
    waited = raised(1, "Timed out waiting 4000ms for recv operation to complete.", when=10.0)
    lost = raised(0, "Connection closed by peer", when=15.0)
    logs = [calls(*STEP, *STEP)] * 2
    (finding,) = explain_by_torch_error(FailureFacts([waited, lost], logs))
    assert (finding.code, finding.ranks) == ("DDP402", (0,)) and "came to it 5 s after" in finding.message
    working = {0: ("evaluate.py:7", "train.py:40")}
    (finding,) = explain_by_torch_error(FailureFacts([waited], [logs[0][:-1], logs[0]], at_work=working))
    assert "still at work at evaluate.py:7" in finding.message and finding.location == Location("evaluate.py", 7)
    assert not explain_by_torch_error(FailureFacts([waited], [logs[0][:-1], logs[0]]))  # it may wait elsewhere
    assert not explain_by_torch_error(FailureFacts([waited, lost], [calls("barrier"), logs[0]]))  # another collective
    assert not explain_by_torch_error(FailureFacts([waited, lost], [logs[0][:-1], logs[0]]))  # it has never come to it


def test_an_exception_of_the_script_is_not_torchs() -> None:
    assert not explain_by_torch_error(FailureFacts([raised(0, "CUDA out of memory")], [calls(*STEP)] * 2))
    assert not explain_by_torch_error(FailureFacts([], []))


def test_parameters_that_are_split_have_no_dimension_to_average_over() -> None:
    text = "aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all"
    found = judged(text, (), replace(wrapper([], []), location=Location.parse(LINE)))
    assert found.code == "DDP401" and "DTensor parameters" in found.message


def test_calls_that_do_not_match_without_a_failure() -> None:
    (found,) = diagnose(FailureFacts([], [calls("all_reduce"), calls("broadcast")], [0, 1]))
    assert found.code == "DDP403" and "no rank failed" in found.evidence[-1]


def test_calls_of_dumps_that_do_not_match() -> None:
    logs = [calls("all_reduce"), calls("broadcast")]
    group = GroupLogs("world", (0, 1), 0, logs, frozenset({0, 1}))
    codes = [finding.code for finding in diagnose_dumps([group], {0: "waits", 1: "waits"}, RanksSeen({}))]
    assert codes == ["DDP403"]
