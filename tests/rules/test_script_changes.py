"""The line that has changed a wrapped module, in findings that notice the change later."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.loop import ModuleChanged, ScheduleState
from ddpcheck.findings.evidence.script import OptimizerEnd, OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding
from ddpcheck.record.rank.line_recorder import LineRecorder
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.module_uses import WriteRecorder
from ddpcheck.rules.optimizers.ddp223_optimizer_options import judge_optimizer_options
from ddpcheck.rules.optimizers.ddp507_learning_rate import judge_schedule
from ddpcheck.rules.replicas.ddp222_module_structure_or_mode import MODE
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_data_assignments, judge_replaced
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_local_writes
from ddpcheck.rules.replicas.steps import locate_change
from tests.reports import assert_says

WRAPS, LOADS, RESETS, THAWS = (Location("train.py", line) for line in (5, 9, 12, 40))
LOADED = ModuleChanged(0, "values", "load_state_dict", ("head.weight",), LOADS)
RESET = ModuleChanged(0, "values", "apply", ("head.weight",), RESETS)
WRITES, NOTICED = Location("model.py", 20), Location("model.py", 3)
MULTIPLIED = ModuleChanged(0, "written", "mul_", ("head.weight", "head.bias"), THAWS, forwards=3)
WRITTEN = ModuleChanged(0, "buffer", "", ("head.weight",), WRITES)
HOOKS = Location("train.py", 7)
HOOKED = ModuleChanged(0, "hook", "register_comm_hook", ("body.weight",), HOOKS)
DIVIDED = ModuleChanged(0, "scale", "set_gradient_divide_factor", ("head.weight",), LOADS)
THAWED = ModuleChanged(0, "requires_grad", "requires_grad_", ("head.weight",), THAWS)


def finding(code: str, *subjects: str) -> Finding:
    return replace(make_finding(code, subjects or ("head.weight",), "changed"), location=NOTICED)


@pytest.mark.parametrize(
    ("code", "changes", "where", "ranks"),
    [
        ("DDP515", [[LOADED], []], LOADS, (0,)),
        ("DDP515", [[LOADED], [LOADED]], LOADS, ()),
        ("DDP515", [[LOADED, RESET], [LOADED]], RESETS, (0,)),  # what all ranks load is no reason to differ
        ("DDP515", [[], []], WRAPS, ()),  # it comes after this line
        ("DDP515", [[replace(LOADED, forwards=3)], []], WRAPS, ()),
        ("DDP306", [[replace(LOADED, forwards=3)], []], LOADS, (0,)),
        ("DDP306", [[replace(LOADED, forwards=3)]] * 2, NOTICED, ()),
        ("DDP503", [[LOADED], [LOADED]], LOADS, ()),  # with assign=True
        ("DDP503", [[replace(THAWED, names=())], []], THAWS, ()),
        ("DDP503", [[ModuleChanged(0, "parameters", "head", (), RESETS)], []], RESETS, ()),
        ("DDP503", [[ModuleChanged(0, "parameters", "body", ("body.bias",), RESETS)], []], NOTICED, ()),
        ("DDP302", [[LOADED, HOOKED]] * 2, HOOKS, ()),
        ("DDP214", [[WRITTEN], []], WRITES, (0,)),
        ("DDP214", [[WRITTEN], [WRITTEN]], WRITES, ()),
        ("DDP215", [[WRITTEN], []], WRITES, ()),  # the broadcast changes those of the others
        ("DDP214", [[replace(WRITTEN, location=None)], [LOADED]], NOTICED, (0,)),
        ("DDP306", [[MULTIPLIED], []], THAWS, (0,)),
        ("DDP306", [[MULTIPLIED, replace(LOADED, forwards=3)], []], LOADS, (0,)),  # which writes each of them
        ("DDP306", [[MULTIPLIED], [MULTIPLIED]], THAWS, ()),  # by values of each rank's own
        ("DDP306", [[replace(MULTIPLIED, names=("head.bias",))]] * 2, NOTICED, ()),
        ("DDP306", [[MULTIPLIED, replace(MULTIPLIED, location=RESETS)]] * 2, NOTICED, ()),  # which of them?
        ("DDP301", [[LOADED], []], NOTICED, ()),
        ("DDP303", [[DIVIDED], [DIVIDED]], LOADS, ()),
        ("DDP303", [[replace(DIVIDED, names=("body.weight",))]] * 2, NOTICED, ()),
    ],
)
def test_the_line_of_a_change(code: str, changes: Any, where: Location, ranks: Any) -> None:
    located = locate_change(finding(code), changes, WRAPS)
    assert (located.location, located.ranks) == (where, ranks)


def test_parameters_that_are_written_at_several_lines() -> None:
    several = finding("DDP306", "body.weight", "head.weight")
    both = [
        ModuleChanged(0, "written", "copy_", (name,), line, forwards=1)
        for name, line in (("body.weight", LOADS), ("head.weight", RESETS))
    ]
    located = locate_change(several, [both] * 2, WRAPS)
    assert located.location == LOADS and f"others are written at {RESETS}" in located.evidence
    assert locate_change(several, [both[:1]] * 2, WRAPS) == several  # why the second differs is not known


SCHEDULE = ScheduleState(WRAPS, 48, LOADS, turns=24, ends=(24, 24))
ENDLESS = replace(SCHEDULE, ends=(48, 48), by_world=True, numbers=(0.05, 1.0))


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        (SCHEDULE, True),
        (replace(SCHEDULE, ends=(48, 24)), True),  # a cosine that goes up again
        (replace(SCHEDULE, ends=(48, 48)), False),  # as long as the steps of all ranks
        (replace(SCHEDULE, ends=(8, 1)), False),  # a warm-up
        (replace(SCHEDULE, turns=48), False),  # after each of two backward passes
        (ENDLESS, True),
        (replace(ENDLESS, numbers=(0.05, 2.0)), False),
    ],
)
def test_a_schedule_that_steps_once_for_each_rank(schedule: ScheduleState, found: bool) -> None:
    findings = judge_schedule([OptimizerEnd(0, 24, 24, schedule=schedule)] * 2, 2)
    assert_says(findings, "DDP507 ... at train.py:9" if found else "")
    assert not judge_schedule([OptimizerEnd(0, 24, 24, schedule=schedule)] * 3, 3)


def test_the_line_of_a_learning_rate_that_only_one_rank_lowers() -> None:
    apart = [
        OptimizerStep(0, 3, {"group 0 lr": rate}, THAWS, rate=WRAPS, schedule=ScheduleState(WRAPS, steps, LOADS))
        for rate, steps in (("0.1", 0), ("0.05", 1))
    ]
    alike = [replace(one, count=0, options={"group 0 lr": "0.1"}) for one in apart]
    assert_says(judge_optimizer_options([alike, apart]), "DDP507 ... at train.py:9 in")
    own = [replace(one, schedule=ScheduleState(WRAPS, 3, LOADS)) for one in apart]  # of another length on each rank
    assert_says(judge_optimizer_options([alike, own]), "DDP507 ... at train.py:5 in")


def test_the_writes_of_wrapped_parameters_are_followed() -> None:
    before = dict(vars(nn.Parameter))
    layer, second = nn.Linear(2, 2), nn.Linear(2, 2)
    changes: list[ModuleChanged] = []
    written: list[int] = []
    watch: Any = SimpleNamespace(number=0, module_parameters=layer.named_parameters, forwards=1, step=1)
    watch.parameters_written = lambda: written.append(1)
    try:
        run: Any = Recording(changes.append)
        run.watches = [watch]
        recorder = WriteRecorder(run)
        recorder.follow_wrapper(watch)
        copy.deepcopy(layer)
        second.weight.data.copy_(layer.weight.data)
        recorder.patch_for_step(begins=True)
        layer.weight.data.zero_()
        recorder.patch_for_step(begins=False)
        recorder.write()
        assert not changes
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.5)
            layer.weight[0] = 1.0
            layer.bias += 1.0
        layer.weight.data.clamp_(-1.0, 1.0)
        layer.bias.data = torch.zeros(2)
        nn.init.ones_(layer.weight)
        recorder.write()
    finally:
        for name in set(vars(nn.Parameter)) - set(before):
            delattr(nn.Parameter, name)
    assert [change.how for change in changes] == ["mul_", "__setitem__", "__iadd__", "clamp_", ".data", "fill_"]
    assert changes[0].names == ("weight", "bias") and written
    assert len({change.location for change in changes}) == len(changes)


EVALUATES = ModuleChanged(0, "mode", "eval", ("",), RESETS, 9, 9)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ([[EVALUATES, replace(EVALUATES, location=LOADS)], [replace(EVALUATES, location=LOADS)]], RESETS),
        ([[replace(EVALUATES, location=LOADS, step=4), EVALUATES], []], RESETS),  # the last one
        ([[EVALUATES], [EVALUATES]], RESETS),  # after which another rank alone has come to train()
        ([[EVALUATES, replace(EVALUATES, location=LOADS)]] * 2, WRAPS),  # who knows which
        ([[replace(EVALUATES, step=20)], []], WRAPS),  # later
        ([[replace(EVALUATES, names=("head",))], []], WRAPS),  # of a part of it
        ([[], [EVALUATES]], WRAPS),  # by a rank that trains
    ],
)
def test_the_line_since_which_a_rank_evaluates(changes: list[list[ModuleChanged]], where: Location) -> None:
    mode = make_finding("DDP222", ("(the model)",), f"the model does not have the same {MODE} on every rank.")
    apart = replace(mode, location=WRAPS, ranks=(0,), steps=(10,))
    assert locate_change(apart, changes, WRAPS).location == where
    other = replace(apart, message="the model does not have the same class or options on every rank.")
    assert locate_change(other, changes, WRAPS).location == WRAPS


def test_the_calls_of_eval_that_are_written_down() -> None:
    made: list[ModuleChanged] = []
    module = nn.Sequential(nn.Linear(2, 1))
    paths = {id(part): path for path, part in module.named_modules()}
    watch: Any = SimpleNamespace(number=0, module=module, forwards=3, step=2, path_of=lambda part: paths.get(id(part)))
    run: Any = Recording(made.append)
    run.watches = [watch]
    recorder = LineRecorder.__new__(LineRecorder)
    vars(recorder).update(_run=run, _seen=set(), _eval_counts={})
    for part in (nn.ModuleList([module]), module[0], nn.Linear(2, 1)):
        for _ in range(2):
            recorder._record_eval(part)
        made.append(EVALUATES)
        recorder._seen.clear()
    assert [one.names for one in made if one is not EVALUATES] == [("",), ("0",)]


def test_an_assignment_to_data_of_a_shard_or_in_its_place() -> None:
    ignored = replace(LOADED, what="ignored", how=".data")
    assert_says(judge_data_assignments([[ignored], [ignored]]), "DDP503 ... ('head.weight',) ... at train.py:9 in")
    for forwards, words in ((0, "the first forward pass fails"), (3, "puts it back")):
        replaced = [ModuleChanged(0, "replaced", "head.weight", ("head.weight",), LOADS, forwards)]
        assert_says(judge_replaced([replaced] * 2), f"DDP503 ... ('head.weight',) ... at train.py:9 in ... {words}")
    assert judge_data_assignments([[LOADED, THAWED], [RESET]]) == judge_replaced([[LOADED, THAWED], [RESET]]) == []


def test_shards_that_one_rank_alone_writes_before_the_first_forward_pass() -> None:
    written = ModuleChanged(0, "written", "uniform_", ("head.weight", "head.bias"), LOADS)
    kept = {"head.weight": 1, "head.bias": 2, "body.weight": 3}
    findings = judge_local_writes([[], [written]], [kept, {"body.weight": 3}])
    assert_says(findings, f"DDP515 ... {written.names} of ranks (1,) at train.py:9 in")
    assert judge_local_writes([[written], []], [{}, {}]) == []  # which was on meta, and gets other parameters
    assert judge_local_writes([[], [replace(written, forwards=1)]], [kept, kept]) == []
    others = replace(written, names=("body.weight",))
    assert judge_local_writes([[others], [written]], [kept, kept]) == []  # each rank writes what it holds
