"""The line of a finding that was recorded beside the line at which it is noticed, and the advice on a cause."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.loop import ModuleChanged, ScheduleState
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.script import GradientsClipped, OptimizerEnd, OptimizerStep
from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.figures import PathStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names, make_finding
from ddpcheck.record.rank.line_recorder import LineRecorder
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.module_uses import WriteRecorder
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_scaled_by_hand, judge_step_gradients
from ddpcheck.rules.optimizers.ddp223_optimizer_options import judge_optimizer_options
from ddpcheck.rules.optimizers.ddp507_learning_rate import judge_schedule
from ddpcheck.rules.optimizers.script_optimizers import judge_unsynchronized
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.replicas.ddp208_parameter_value import locate_seed
from ddpcheck.rules.replicas.ddp222_module_structure_or_mode import MODE
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_assigned, judge_replaced
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
    lines = ("body.weight", LOADS), ("head.weight", RESETS)
    both = [replace(MULTIPLIED, names=(name,), location=line) for name, line in lines]
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
    assert_says(judge_assigned([[ignored], [ignored]]), "DDP503 ... ('head.weight',) ... at train.py:9 in")
    for forwards, words in ((0, "the first forward pass fails"), (3, "puts it back")):
        replaced = [ModuleChanged(0, "replaced", "head.weight", ("head.weight",), LOADS, forwards)]
        assert_says(judge_replaced([replaced] * 2), f"DDP503 ... ('head.weight',) ... at train.py:9 in ... {words}")
    assert judge_assigned([[LOADED, THAWED], [RESET]]) == judge_replaced([[LOADED, THAWED], [RESET]]) == []


def test_shards_that_one_rank_alone_writes_before_the_first_forward_pass() -> None:
    written = ModuleChanged(0, "written", "uniform_", ("head.weight", "head.bias"), LOADS)
    kept = {"head.weight": 1, "head.bias": 2, "body.weight": 3}
    findings = judge_local_writes([[], [written]], [kept, {"body.weight": 3}])
    assert_says(findings, f"DDP515 ... {written.names} of ranks (1,) at train.py:9 in")
    assert judge_local_writes([[written], []], [{}, {}]) == []  # which was on meta, and gets other parameters
    assert judge_local_writes([[], [replace(written, forwards=1)]], [kept, kept]) == []
    others = replace(written, names=("body.weight",))
    assert judge_local_writes([[others], [written]], [kept, kept]) == []  # each rank writes what it holds


STEP, REDUCES, SENDS, MAKES, SEEDS, SCALES = (Location("train.py", line) for line in (30, 20, 10, 12, 5, 15))


def step(count: int, rank: int, **more: Any) -> OptimizerStep:
    places: dict[str, Any] = {"built_at": MAKES, "reduced_at": REDUCES, "collectives": 2 * count}
    return OptimizerStep(0, count, {"class": "SGD"}, STEP, **places | more)


def steps(values: Any, gradients: Any, **more: Any) -> list[list[OptimizerStep]]:
    """Three steps of two ranks: of the parameter "w", whose value and gradient are functions of step and rank."""
    return [
        [step(n, r, local_params={"w": values(n, r)}, gradients={"w": gradients(n, r)}, **more) for r in (0, 1)]
        for n in range(3)
    ]


def test_what_is_reduced_or_sent_by_hand_is_told_there() -> None:
    for more, reduced_at, sent_at in (({}, REDUCES, MAKES), ({"collectives": 0, "broadcast_at": SENDS}, MAKES, SENDS)):
        apart = steps(lambda n, rank: n * (rank + 1), lambda n, rank: (1.0, rank + n), **more)
        words = f"DDP501 ... at {reduced_at} ... optimizer steps at {STEP}"
        assert_says(judge_unsynchronized(apart, [], wrapped=False), words)
        unequal = steps(lambda n, rank: 10 * n + rank + 1, lambda n, _: (1.0, n + 1.0), **more)
        assert_says(judge_unsynchronized(unequal, [], wrapped=False), f"DDP208 ... at {sent_at}")


def test_values_that_differ_from_the_start_are_told_at_the_seed_if_that_differs() -> None:
    finding = make_finding("DDP208", ("w",), "", location=STEP)
    apart = [step(0, rank, seed=rank, seeded_at=SEEDS) for rank in (0, 1)]
    assert_says([locate_seed(finding, apart)], "at train.py:5 ... rank 0: 0; rank 1: 1 ... seed")
    changes: list[dict[str, Any]] = [{"seed": 1}, {"seed": None}, {"seeded_at": None}]
    for change in changes:
        assert locate_seed(finding, [replace(apart[0], **change), apart[1]]) is finding
    assert locate_seed(replace(finding, code="DDP306"), apart).location == STEP


def test_gradients_that_differ_by_the_scale_of_a_scaler_are_told_at_the_line_that_loads_it() -> None:
    of_ranks = [step(0, rank, ddp_params=("0/w",), averaged=True, norms={"0/w": 16.0**-rank}) for rank in (0, 1)]
    scaled = [replace(of_ranks[0], scale=64.0, scale_at=SCALES), replace(of_ranks[1], scale=1024.0)]
    assert_says(judge_step_gradients([scaled]), "DDP301 ... at train.py:15 ... rank 0: 64; rank 1: 1024 ... GradScaler")
    same = [replace(of_rank, scale=64.0) for of_rank in of_ranks]
    assert_says(judge_step_gradients([same]), "at train.py:20 ... not GradScaler")


def test_gradients_that_are_scaled_after_a_reduction_by_hand_are_told_there() -> None:
    alone = {"v": 1, "w": 2}
    gradients = [dict.fromkeys(alone, (1.0 + rank, 2.0 + 2 * rank)) for rank in (0, 1)]
    of_ranks = [step(0, rank, local_params=alone, gradients=gradients[rank]) for rank in (0, 1)]
    assert_says(judge_scaled_by_hand([of_ranks]), f"DDP301 ... at {REDUCES}")


def test_an_optimizer_that_a_hook_steps_in_backward_is_told_at_the_line_that_registers_the_hook() -> None:
    finding = make_finding("DDP515", ("w",), "w was changed.", location=STEP, steps=(0,))
    hooked = ModuleChanged(0, "stepped", "Adam.step", ("w",), SCALES)
    found = locate_change(finding, [[hooked], [hooked]], MAKES)
    assert_says([found], "DDP310 ... at train.py:15 in steps (0,) ... Adam.step")
    assert locate_change(finding, [[], []], MAKES).code == "DDP515"


def missing(end: PathEnd, *ranks: int) -> list[Finding]:
    states = [{"head.weight": "missing" if n in ranks else "contributes", "body.weight": "contributes"} for n in (0, 1)]
    evidence = [StepEvidence(n, 0, states[n], {"head.weight": end}) for n in (0, 1)]  # type: ignore[arg-type]
    return judge_parameters(evidence, WrapperFacts(), Names(locations={"head.weight": MAKES}))


LINE, REGION = Location("net.py", 40), Location("net.py", 38)


@pytest.mark.parametrize(
    ("code", "end", "ranks", "where"),
    [
        ("DDP103", PathEnd("cut", "detach()", LINE, steps=(PathStep("linear()"),)), (0, 1), LINE),
        ("DDP103", PathEnd("cut", "torch.no_grad()", LINE, no_grad_location=REGION), (0, 1), REGION),
        ("DDP102", PathEnd("unreachable", "linear()", LINE), (0, 1), LINE),
        ("DDP101", PathEnd("unused"), (0, 1), MAKES),
        ("DDP101", PathEnd("unused", location=LINE), (0, 1), LINE),
        ("DDP104", PathEnd("unused", location=LINE), (1,), LINE),
    ],
)
def test_a_missing_parameter_is_told_where_its_path_ends(code: str, end: PathEnd, ranks: Any, where: Location) -> None:
    made = f"{'not ' if where == MAKES else ''}parameter made at {MAKES}"
    assert_says(missing(end, *ranks), f"{code} ... at {where} ... {made}")


def test_a_cut_is_mended_by_what_it_is() -> None:
    for reason, advice in (
        ("detach()", "Remove detach()."),
        ("torch.no_grad()", "Run it outside of torch.no_grad()"),
        ("argmax(), which is not differentiable", "instead of argmax()"),
        ("a re-entrant checkpoint of which no input requires grad", "Pass use_reentrant=False"),
    ):
        assert_says(missing(PathEnd("cut", reason, LINE), 0, 1), f"DDP103 ... {advice} ... requires_grad_(False)")


def test_only_a_load_after_wrapping_is_told_to_leave_assign_out() -> None:
    finding = make_finding("DDP503", ("head.weight",), "", location=STEP)
    for what, how, words in (("values", "load_state_dict", "assign"), ("parameters", "head.weight", "not assign")):
        change = ModuleChanged(0, what, how, ("head.weight",), SCALES)
        assert_says([locate_change(finding, [[change], [change]], MAKES)], f"at train.py:15 ... {words}=True")


@pytest.mark.parametrize(
    ("on", "limit", "words"),
    [
        ((1,), 0.5, f"of ranks (1,) ... at {SEEDS} ... Call clip_grad_norm_ on every rank"),
        ((1,), 9.0, f"at {REDUCES} ... not Call clip_grad_norm_"),  # nothing is clipped
        ((0, 1), 0.5, f"at {REDUCES} ... not Call clip_grad_norm_"),
    ],
)
def test_a_clip_on_some_ranks_only_is_the_line(on: tuple[int, ...], limit: float, words: str) -> None:
    of_ranks = [step(2, rank, ddp_params=("0/w",), averaged=True, norms={"0/w": 2.0 - rank}) for rank in (0, 1)]
    clips = [[GradientsClipped(n, 2.0, SEEDS, n, limit=limit) for n in range(3 * (rank in on))] for rank in (0, 1)]
    assert_says(judge_step_gradients([of_ranks], clips), f"DDP301 ... {words}")
