"""DDP306 of evaluated copies, and DDP523: uses and loads that are a fault, and what is written down of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.loop import OF_A_COPY, ModuleChanged
from ddpcheck.findings.evidence.replicas import EvalCall, NothingLoaded, digest_of_values
from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.module_uses import UseRecorder
from ddpcheck.rules.program.ddp523_state_not_loaded import judge_loads
from ddpcheck.rules.replicas.copies import judge_copied_states, judge_evaluations
from ddpcheck.trace.program import Program
from tests.reports import assert_says

MADE, LOADED, WRITTEN = (Location("train.py", line) for line in (9, 50, 20))
HELD = LocalModel(0, 4, "ema", "Net", {"w": 1}, is_copy=True, is_called=False, location=MADE)
WRITES = ModuleChanged(OF_A_COPY, "written", "lerp_", ("ema",), WRITTEN)


def looks(*values: int) -> list[LocalModel]:
    return [replace(HELD, count=1 << number, values={"w": one}, is_called=True) for number, one in enumerate(values)]


@pytest.mark.parametrize(
    ("here", "there", "writes", "line", "step"),
    [
        ((5, 6, 7), (1, 2, 3), ([WRITES], [WRITES]), MADE, 1),  # from other weights
        ((1, 2, 3), (1, 1, 1), ([WRITES], []), WRITTEN, 2),
        ((1, 1, 2, 3), (1, 1, 4, 5), ([WRITES], [WRITES]), WRITTEN, 4),
        ((1, 2, 3), (1, 1, 1), ([WRITES, replace(WRITES, location=LOADED)], [WRITES]), LOADED, 2),
        ((1, 2, 3), (1, 4, 5), ([WRITES, replace(WRITES, location=LOADED)],) * 2, MADE, 2),  # who knows which
    ],
)
def test_a_copy_is_at_fault_where_it_is_written(here: Any, there: Any, writes: Any, line: Any, step: int) -> None:
    ranks = "(0,)" if line != MADE and writes[0] != writes[1] else "()"  # only rank 0 comes to that line
    findings = judge_copied_states([looks(*here), looks(*there)], writes)
    assert_says(findings, f"DDP306 ... of ranks {ranks} at {line} in steps ({step},)")


def test_a_module_beside_the_wrappers_that_training_calls_and_that_stays_as_it_is() -> None:
    def teacher(*values: int) -> list[LocalModel]:
        return [replace(one, is_copy=False, is_independent=True) for one in looks(*values)]

    assert_says(judge_copied_states([teacher(1, 1), teacher(2, 2)]), "DDP306 ... at train.py:9 ... no wrapper")
    assert not judge_copied_states([teacher(1, 1), teacher(1, 1)])
    assert not judge_copied_states([teacher(1, 3), teacher(2, 4)])  # trained by hand


def use(digest: int, **more: Any) -> EvalCall:
    return replace(EvalCall(12, "ema", ("train.py:60",), digest, False, False, MADE), **more)


def test_a_copy_that_one_rank_updates_and_all_evaluate() -> None:
    moves = [HELD, replace(HELD, count=8, values={"w": 2})]
    stays = [HELD, replace(HELD, count=8)]
    words = "DDP306 warning ... at train.py:9 ... | in the training loop it has changed on rank 0, not on rank 1 |"
    assert_says(judge_evaluations([[use(3)], [use(1)]], [moves, stays]), words)
    assert_says(judge_evaluations([[use(3)], [use(1)]], [moves, stays], [[WRITES], []]), "of ranks (0,) at train.py:20")


def test_statistics_that_each_rank_has_estimated_on_its_own_part() -> None:
    def judged(*statistics: tuple[float, ...]) -> list[str]:
        uses = [[use(3, statistics=one, estimated_at=LOADED, wrapped=True)] for one in statistics]
        return [f"{one.code} {one.location}" for one in judge_evaluations(uses, [[] for _ in uses])]

    assert judged((0.0, 1.0, 4.0, 1.0), (0.2, 1.0, 4.0, 1.0)) == [f"DDP214 {LOADED}"]
    assert not judged((0.0, 1.0, 4.0, 1.0), (0.02, 1.0, 4.0, 1.0))  # of shuffled samples
    assert not judged((), ()) and not judged((0.0, 1.0), ()) and not judged((0.0, 1.0))


def test_statistics_are_written_down_where_they_were_estimated_again() -> None:
    written: list[EvalCall] = []
    run = Recording(written.append)
    recorder = UseRecorder(run, list)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    recorder.follow(model, "ema", MADE)
    model[1].reset_running_stats()  # before training

    def evaluate(step: int, mode: bool = False) -> None:
        run.steps = step
        model.train(mode)
        with torch.no_grad():
            model(torch.ones(2, 2))

    evaluate(4)
    model[1].reset_running_stats()
    evaluate(4, mode=True)
    evaluate(5)
    model.load_state_dict(model.state_dict())
    evaluate(6)
    assert [len(call.statistics) for call in written] == [0, 0, 6, 0]  # while they are estimated, none
    assert str(written[2].estimated_at).rpartition(":")[0].endswith("test_script_states.py")


def test_uses_that_are_no_fault() -> None:
    for here, there in (
        ([use(3)], []),  # on rank 0 only
        ([use(3)], [use(3)]),  # broadcast before, or updated alike
        ([use(3)], [use(1, lines=("train.py:70",))]),  # from a line of its own
        ([use(3, wrapped=True)], [use(1, wrapped=True)]),  # training has left it so: another finding, if any
    ):
        assert not judge_evaluations([here, there], [[], []])


def test_a_wrapped_module_into_which_what_was_kept_is_put_back() -> None:
    here, there = use(3, name="Net", wrapped=True), use(digest_of_values([1]), name="Net", wrapped=True)
    assert_says(judge_evaluations([[replace(here, location=None)], [there]], [[], [HELD]]), "at train.py:9")
    assert_says(judge_evaluations([[here], [replace(there, loaded=True, location=LOADED)]], [[], []]), "at train.py:50")


def test_the_uses_of_a_copy_that_are_written_down() -> None:
    written: list[EvalCall] = []
    run, held = Recording(written.append), list[torch.Tensor]()
    recorder = UseRecorder(run, lambda: held)
    copy = nn.Linear(2, 1)
    outer = nn.Sequential(copy)
    recorder.follow(outer, "ema", MADE)

    def evaluate() -> None:
        with torch.no_grad():
            copy(torch.ones(1, 2))

    evaluate()  # nothing has been trained
    run.steps = 3
    copy(torch.ones(1, 2))  # it trains
    assert not written
    for _ in range(3):
        evaluate()
    run.steps, held[:] = 4, list(copy.parameters())
    evaluate()  # an optimizer of its own has it
    assert [call.step for call in written] == [3]  # one from this line


def test_states_that_load_nothing() -> None:
    plain = NothingLoaded("Net", LOADED, "module.", True, 4)
    compiled = NothingLoaded("Net", LOADED, "_orig_mod.", False, 4)
    assert_says(judge_loads(Program(loads=[[], []])), "")
    assert_says(judge_loads(Program(loads=[[plain]] * 2)), f"() at {LOADED} ... of the state begin with 'module.'")
    assert_says(judge_loads(Program(loads=[[], [compiled]])), f"(1,) at {LOADED} ... module begin with '_orig_mod.'")
