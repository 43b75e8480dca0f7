"""DDP1xx from hand-made evidence, each with a clean twin, and the same question asked in any loop."""

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.anomalous import detect_anomalous_params
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import ParameterChange, PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import Names
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.parameters.ddp107_zero_gradient_parameter import zero_everywhere
from ddpcheck.rules.parameters.ddp110_uninitialised_parameter import judge_uninitialised

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")
nn = torch.nn

import torch.distributed as dist  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from ddpcheck.gather.autograd.autograd_graph import all_names  # noqa: E402
from ddpcheck.gather.phases import local_step as local  # noqa: E402
from ddpcheck.gather.phases import model_build, rank_state, repeated_step  # noqa: E402
from ddpcheck.recipe.recipe import Recipe  # noqa: E402
from ddpcheck.report.checking.check import check  # noqa: E402
from ddpcheck.testing.fixture import DDPWorld  # noqa: E402
from tests.reports import only  # noqa: E402

PLAIN = WrapperFacts()
FINDS_UNUSED = WrapperFacts(find_unused_parameters=True)
STATIC = WrapperFacts(static_graph=True)
ALL = ("encoder.weight", "head.weight", "extra.weight", "extra.bias")
HERE = Location("model.py", 7)


def step_evidence(rank: int = 0, step: int = 0, **more: Any) -> StepEvidence:
    """Of a rank on which everything contributes, but for `missing`, `zero` and `lost`."""
    states = dict.fromkeys(ALL, "contributes")
    ends = {}
    for state in ("missing", "zero", "lost"):
        for name in more.pop(state, ()):
            states[name] = state
            if state == "missing":
                ends[name] = more.get("end", PathEnd("unused"))
    more.pop("end", None)
    return StepEvidence(rank, step, states, ends, **more)


def two_ranks(steps: int = 3, **of_all: Any) -> list[StepEvidence]:
    return [step_evidence(rank, step, **of_all) for step in range(steps) for rank in range(2)]


def judge(evidence: list[StepEvidence], wrapper: WrapperFacts = PLAIN, **more: Any) -> list[Finding]:
    return judge_parameters(evidence, wrapper, more.pop("names", Names()), **more)


@pytest.mark.parametrize("wrapper", [PLAIN, STATIC, WrapperFacts(is_ddp=False)], ids=["plain", "static", "other"])
def test_a_module_of_which_everything_contributes_is_clean(wrapper: WrapperFacts) -> None:
    assert judge(two_ranks(), wrapper) == []


def test_no_evidence_gives_no_finding() -> None:
    assert judge([]) == [] and zero_everywhere([]) == []


def test_what_is_never_read_is_one_finding_a_module() -> None:
    finding = only(judge(two_ranks(missing=("extra.weight", "extra.bias"))))
    assert (finding.code, finding.severity) == ("DDP101", Severity.ERROR)
    assert finding.subjects == ("extra.weight", "extra.bias")
    assert (finding.ranks, finding.steps) == ((), ())
    assert "Expected to have finished reduction" in finding.evidence[0]


def test_two_modules_that_are_never_read_are_two_findings() -> None:
    findings = judge(two_ranks(missing=("extra.weight", "extra.bias", "encoder.weight")))
    assert sorted(finding.subjects for finding in findings) == [("encoder.weight",), ("extra.weight", "extra.bias")]


@pytest.mark.parametrize(("wrapper", "option"), [(FINDS_UNUSED, "find_unused_parameters"), (STATIC, "static_graph")])
def test_unused_is_a_warning_where_the_wrapper_tolerates_it(wrapper: WrapperFacts, option: str) -> None:
    finding = only(judge(two_ranks(missing=("extra.weight", "extra.bias")), wrapper))
    assert (finding.code, finding.severity) == ("DDP101", Severity.WARNING)
    assert any(f"{option}=True" in fact for fact in finding.evidence)


def test_a_path_that_is_cut_is_an_error_whatever_the_wrapper_tolerates() -> None:
    end = PathEnd("cut", "detach()", HERE, "encoder")
    for wrapper in (PLAIN, FINDS_UNUSED):
        finding = only(judge(two_ranks(missing=("encoder.weight",), end=end), wrapper))
        assert (finding.code, finding.severity) == ("DDP103", Severity.ERROR)
        assert "cut by detach() at model.py:7 (in module encoder)" in finding.message


def test_what_does_not_reach_the_loss_is_told_with_its_last_use() -> None:
    finding = only(judge(two_ranks(missing=("extra.weight",), end=PathEnd("unreachable", "linear()", HERE))))
    assert finding.code == "DDP102" and finding.subjects == ("extra.weight",)
    assert any("linear() at model.py:7" in fact for fact in finding.evidence)


def test_paths_cut_at_one_line_are_one_finding_and_at_two_lines_two() -> None:
    one, other = PathEnd("cut", "detach()", HERE), PathEnd("cut", "detach()", Location("model.py", 8))
    names = ("extra.weight", "encoder.weight")
    together = StepEvidence(0, 0, dict.fromkeys(names, "missing"), dict.fromkeys(names, one))
    apart = StepEvidence(0, 0, dict.fromkeys(names, "missing"), dict(zip(names, (one, other), strict=True)))
    assert only(judge([together])).subjects == names
    assert len(judge([apart])) == 2


def test_all_names_of_a_tied_parameter_and_its_line_are_told() -> None:
    names = Names({"extra.weight": ("extra.weight", "tied.weight")}, {"extra.weight": HERE})
    finding = only(judge(two_ranks(missing=("extra.weight",)), names=names))
    assert finding.subjects == ("extra.weight", "tied.weight") and finding.location == HERE


def test_missing_on_one_rank_names_rank_and_steps() -> None:
    evidence = [
        step_evidence(r, s, missing=("extra.weight",) if (r, s) == (1, 2) else ()) for s in (0, 1, 2) for r in (0, 1)
    ]
    finding = only(judge(evidence))
    assert (finding.code, finding.ranks, finding.steps) == ("DDP104", (1,), (2,))
    assert "rank 1 in step 2" in finding.message
    assert judge(evidence, FINDS_UNUSED) == []


def test_missing_on_each_rank_in_turn_is_rank_dependent_on_all() -> None:
    evidence = [step_evidence(r, s, missing=("extra.weight",) if s % 2 == r else ()) for s in range(4) for r in (0, 1)]
    finding = only(judge(evidence))
    assert (finding.code, finding.ranks) == ("DDP104", ())


@pytest.mark.parametrize(("missing_in", "told"), [((0,), (0,)), ((2,), (2,)), ((1, 2), (1, 2))])
def test_missing_on_all_ranks_in_some_steps(missing_in: tuple[int, ...], told: tuple[int, ...]) -> None:
    evidence = [
        step_evidence(r, s, missing=("extra.bias",) if s in missing_in else ()) for s in (0, 1, 2) for r in (0, 1)
    ]
    finding = only(judge(evidence))
    assert (finding.code, finding.severity, finding.ranks, finding.steps) == ("DDP105", Severity.ERROR, (), told)
    assert judge(evidence, FINDS_UNUSED) == []
    assert any("static_graph=True promises" in fact for fact in only(judge(evidence, STATIC)).evidence)


def test_a_gradient_that_is_lost_on_one_rank() -> None:
    evidence = [step_evidence(0), step_evidence(1, lost=("head.weight",))]
    finding = only(judge(evidence))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP108", ("head.weight",), (1,))
    assert only(judge(two_ranks(lost=("head.weight",)))).ranks == ()


def test_the_function_that_lost_a_gradient_is_named_with_its_line() -> None:
    evidence = [
        StepEvidence(0, 0, dict.fromkeys(ALL, "lost"), {"extra.weight": PathEnd("lost", "Scale.backward()", HERE)})
    ]
    by_name = {finding.subjects: finding.message for finding in judge(evidence)}
    assert "Scale.backward() at model.py:7 returns None" in by_name["extra.weight",]
    assert "a custom autograd Function" in by_name[tuple(name for name in ALL if name != "extra.weight")]


def test_zero_gradients_are_grouped_by_where_they_become_zero() -> None:
    ends = {"extra.weight": PathEnd("zero", "mul()", HERE), "encoder.weight": PathEnd("zero", "mul()", HERE)}
    finding = only(judge(two_ranks(zero=("extra.weight", "encoder.weight")), zero_ends=ends))
    assert "it becomes zero in mul() at model.py:7" in finding.message


def test_parameters_that_forward_creates_are_told_apart_from_those_in_a_list() -> None:
    leaves = (
        UnregisteredTensor("late.weight", (2, 2), HERE, created_in_forward=True),
        UnregisteredTensor("layers[0].weight", (2, 2)),
    )
    late, listed = judge(two_ranks(unregistered=leaves))
    assert (late.code, listed.code) == ("DDP106", "DDP106") and late.fix != listed.fix
    assert "created in the forward pass" in late.message and "created" not in listed.message


BLOCKS = ("blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "head.weight")


def test_what_holds_a_tensor_that_is_not_registered_is_told_with_its_name() -> None:
    finding = only(judge(two_ranks(unregistered=(UnregisteredTensor("SCALE", (1,), kind="global variable"),))))
    assert finding.subjects == ("SCALE",) and finding.message.startswith("The global variable SCALE receives gradient")


def test_a_sparse_table_that_is_unused_is_an_error_whatever_ddp_looks_for() -> None:
    evidence = two_ranks(missing=("extra.weight",))
    sparse = frozenset({"extra.weight"})
    for wrapper in (WrapperFacts(sparse=sparse), WrapperFacts(find_unused_parameters=True, sparse=sparse)):
        finding = only(judge(evidence, wrapper))
        assert (finding.code, finding.severity) == ("DDP101", Severity.ERROR)
        assert "sparse=False" in finding.fix and "pass find_unused_parameters" not in finding.fix
        refused = any("Expected sparse gradient to be defined" in fact for fact in finding.evidence)
        assert refused == wrapper.find_unused_parameters
    assert only(judge(evidence, FINDS_UNUSED)).severity is not Severity.ERROR
    sometimes = two_ranks(steps=1) + [step_evidence(rank, 1, missing=("extra.weight",)) for rank in range(2)]
    found = judge(sometimes, WrapperFacts(find_unused_parameters=True, sparse=sparse))
    assert only(found).code == "DDP105" and "sparse=False" in found[0].fix
    assert judge(sometimes, FINDS_UNUSED) == []


def changed(what: str, *, missing: bool = True, by: str = "", ranks: tuple[int, ...] = (0, 1)) -> list[StepEvidence]:
    """The head is changed in step 1, on these ranks."""
    return [
        step_evidence(
            rank,
            step,
            missing=("head.weight",) if missing and step else (),
            changed={"head.weight": ParameterChange(what, HERE, by)} if step and rank in ranks else {},
        )
        for step in range(3)
        for rank in range(2)
    ]


@pytest.mark.parametrize("what", ["replaced", "removed", "frozen", "unfrozen", "cast or moved"])
def test_what_forward_does_to_a_parameter_that_ddp_knows_is_one_finding_with_its_line(what: str) -> None:
    finding = only(judge(changed(what)))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP503", ("head.weight",), ())
    assert finding.location == HERE and f"was {what} in the forward pass of step 1" in finding.message
    assert "None" not in finding.message and "{" not in finding.message


def test_the_parameter_that_stands_in_the_place_of_another_and_the_rank_are_named() -> None:
    assert "replaced by body.weight in the forward" in only(judge(changed("replaced", by="body.weight"))).message
    assert only(
        judge(changed("replaced", ranks=(1,))),
    ).ranks == (1,)


@pytest.mark.parametrize("what", ["removed", "frozen"])
def test_what_is_gone_and_not_waited_for_is_nothing(what: str) -> None:
    assert judge(changed(what, missing=False)) == []
    tolerant = judge(changed(what), WrapperFacts(find_unused_parameters=True))
    assert "DDP503" not in [finding.code for finding in tolerant]
    assert "DDP503" not in [finding.code for finding in judge(changed("replaced"), WrapperFacts(is_ddp=False))]


def blocks_missing(*places: tuple[int, int, int]) -> list[StepEvidence]:
    """Two ranks, three steps; `places` are (block, rank, step)."""
    return [
        StepEvidence(
            rank,
            step,
            {name: "missing" if (i, rank, step) in places else "contributes" for i, name in enumerate(BLOCKS)},
            {BLOCKS[i]: PathEnd("unused") for i, r, s in places if (r, s) == (rank, step)},
        )
        for step in range(3)
        for rank in range(2)
    ]


def test_blocks_that_are_skipped_by_chance_are_one_finding_that_says_who_skipped_what() -> None:
    finding = only(judge(blocks_missing((0, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1))))
    assert (finding.code, finding.ranks, finding.subjects) == ("DDP104", (), BLOCKS[:2])
    assert finding.message.startswith("In step 0 blocks.0.weight did not contribute on rank 0, and blocks.1.weight")
    assert "step 1: blocks.1.weight did not contribute on any rank" in finding.evidence


def test_heads_that_take_turns_are_one_finding_with_each_ones_steps() -> None:
    both = [(head, rank, step) for step, head in ((0, 1), (1, 0), (2, 1)) for rank in (0, 1)]
    finding = only(judge(blocks_missing(*both)))
    assert finding.code == "DDP105" and "each in different ones" in finding.message
    assert "steps 0 and 2: blocks.1.weight did not contribute on any rank" in finding.evidence


def test_a_block_that_no_step_took_is_a_note_where_others_of_its_list_take_turns() -> None:
    never = [(0, rank, step) for step in range(3) for rank in (0, 1)]
    evidence = blocks_missing(*never, (1, 0, 0), (1, 1, 0))
    (first,) = [finding for finding in judge(evidence, FINDS_UNUSED) if finding.code == "DDP101"]
    assert (first.subjects, first.severity) == (BLOCKS[:1], Severity.NOTE)
    assert any("check more steps" in fact for fact in first.evidence)
    assert {finding.code: finding.severity for finding in judge(evidence)}["DDP101"] is Severity.ERROR
    assert only(judge(blocks_missing(*never), FINDS_UNUSED)).severity is Severity.WARNING


def test_that_nothing_follows_the_last_step_is_said() -> None:
    finding = only(judge(blocks_missing((0, 0, 2), (0, 1, 2))))
    assert any("no forward follows step 2" in fact for fact in finding.evidence)
    finding = only(judge(blocks_missing((0, 0, 1), (0, 1, 1))))
    assert any("at the next forward after step 1" in fact for fact in finding.evidence)


def test_paths_cut_in_one_block_without_gradients_are_one_finding() -> None:
    ends = {
        name: PathEnd("cut", "torch.no_grad()", Location("model.py", line), "", HERE)
        for line, name in enumerate(("extra.weight", "encoder.weight"), 8)
    }
    evidence = StepEvidence(0, 0, dict.fromkeys(ends, "missing"), ends)
    finding = only(judge([evidence]))
    assert "torch.no_grad() begins at model.py:7" in finding.evidence


def test_a_gradient_that_is_always_zero_is_a_warning_unless_it_wakes() -> None:
    evidence = two_ranks(zero=("extra.weight",))
    finding = only(judge(evidence))
    assert (finding.code, finding.severity, finding.subjects) == ("DDP107", Severity.WARNING, ("extra.weight",))
    assert judge(evidence, nonzero_when_perturbed=frozenset({"extra.weight"})) == []


def test_a_gradient_that_is_zero_in_some_steps_or_on_some_ranks_is_fine() -> None:
    assert judge([step_evidence(0, zero=("extra.weight",)), step_evidence(1)]) == []
    assert judge([step_evidence(0, 0, zero=("extra.weight",)), step_evidence(0, 1)]) == []


def test_where_all_gradients_are_zero_nothing_was_compared_and_that_is_another_rule() -> None:
    assert judge(two_ranks(zero=ALL)) == []


def test_leaves_that_nobody_registered_are_one_finding_a_holder() -> None:
    leaves = (
        UnregisteredTensor("blocks[0].weight", (2, 2), HERE),
        UnregisteredTensor("blocks[1].weight", (2, 2)),
        UnregisteredTensor("raw", (3,)),
    )
    by_list, by_tensor = judge(two_ranks(unregistered=leaves))
    assert (by_list.code, by_list.subjects, by_list.location) == (
        "DDP106",
        ("blocks[0].weight", "blocks[1].weight"),
        HERE,
    )
    assert by_tensor.subjects == ("raw",) and "3" in by_tensor.evidence[0]
    assert by_tensor.ranks == ()
    on_rank_1 = [step_evidence(0), step_evidence(1, unregistered=leaves[2:])]
    assert only(judge(on_rank_1)).ranks == (1,)


def test_searching_for_unused_parameters_where_there_never_are_any_is_a_note() -> None:
    finding = only(judge(two_ranks(), FINDS_UNUSED))
    assert (finding.code, finding.severity) == ("DDP109", Severity.NOTE)
    some = [step_evidence(0, missing=("extra.weight",)), step_evidence(1)]
    assert judge(some, FINDS_UNUSED) == []


def test_an_output_without_tensors_blinds_the_search_for_unused_parameters() -> None:
    evidence = two_ranks(output_type="Output", hidden_from_ddp=())
    assert only(judge(evidence, FINDS_UNUSED)).code == "DDP112"
    assert only(judge(evidence, FINDS_UNUSED)).subjects == ("Output",)
    assert judge(evidence, PLAIN) == []
    assert [f.code for f in judge(evidence, WrapperFacts(is_ddp=False, find_unused_parameters=True))] == ["DDP109"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_parameters_that_the_search_cannot_see_are_marked_ready_twice(reentrant: bool) -> None:
    finding = only(judge(two_ranks(hidden_from_ddp=("head.weight",), reentrant=reentrant), FINDS_UNUSED))
    assert (finding.code, finding.subjects) == ("DDP406", ("head.weight",))
    assert ("re-entrant checkpoint" in finding.evidence[0]) is reentrant


def test_a_gradient_that_arrives_twice_in_one_backward() -> None:
    evidence = two_ranks(arrivals={"head.weight": 2}, reentrant=True)
    finding = only(judge(evidence))
    assert (finding.code, finding.subjects) == ("DDP406", ("head.weight",)) and "2 times" in finding.message
    assert "use_reentrant=False" in finding.fix
    assert judge(evidence, STATIC) == []


def test_lazy_parameters_without_a_shape() -> None:
    assert judge_uninitialised([(), ()]) == []
    finding = only(judge_uninitialised([("head.weight",), ("head.weight", "head.bias")]))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP110", ("head.bias", "head.weight"), ())
    assert only(judge_uninitialised([(), ("head.weight",)])).ranks == (1,)


# --- In any loop ---------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.extra = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        return self.head(hidden.detach() if self.cut else hidden)


def test_any_loop_can_ask_before_backward_and_keeps_its_graph() -> None:
    model = TwoHeads()
    loss = model(torch.ones(2, 3)).sum()
    found = detect_anomalous_params(loss, model)
    assert found and found.missing == ("extra.weight", "extra.bias") and found.unregistered == ()
    assert [finding.code for finding in found.findings] == ["DDP101"]
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
    assert model.head.weight.grad is not None and model.extra.weight.grad is None


@pytest.mark.ddp(world_size=1)
def test_a_training_model_is_spoken_of_by_the_names_of_the_bare_one() -> None:
    model = nn.parallel.DistributedDataParallel(TwoHeads())
    found = detect_anomalous_params(model(torch.ones(2, 3)).sum(), model)
    assert found.missing == ("extra.weight", "extra.bias")


def test_a_loop_in_which_all_is_well_gets_an_empty_answer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    output = model(torch.ones(2, 3))
    for loss in (output.sum(), {"a": output.mean(), "b": [output.sum()]}, output):
        found = detect_anomalous_params(loss, model)
        assert not found and found.findings == ()


def test_with_a_replay_the_cause_and_its_line_are_told() -> None:
    model, x = TwoHeads(cut=True), torch.ones(2, 3)
    found = detect_anomalous_params(model(x).sum(), model, replay=lambda: model(x).sum())
    by_code = {finding.code: finding for finding in found.findings}
    assert set(by_code) == {"DDP101", "DDP103"}
    assert by_code["DDP103"].subjects == ("encoder.weight", "encoder.bias")
    assert "detach()" in by_code["DDP103"].message and f"{os.path.basename(__file__)}:" in by_code["DDP103"].message


def test_a_leaf_outside_the_model_is_reported() -> None:
    model, outside = nn.Linear(3, 1), nn.Parameter(torch.ones(3))
    found = detect_anomalous_params((model(torch.ones(2, 3)) * outside.sum()).sum(), model)
    assert found.missing == () and len(found.unregistered) == 1
    assert [finding.code for finding in found.findings] == ["DDP106"]


def test_frozen_parameters_are_not_missed() -> None:
    model = TwoHeads()
    model.extra.requires_grad_(False)
    assert not detect_anomalous_params(model(torch.ones(2, 3)).sum(), model)


def test_a_loss_without_grad_is_wrong_usage() -> None:
    model = nn.Linear(3, 1)
    for loss in (model(torch.ones(1, 3)).detach(), 3.0, []):
        with pytest.raises(UsageError, match="requires grad"):
            detect_anomalous_params(loss, model)


# --- Against plain autograd ----------------------------------------------------------------------------------------

ABSENT = {"unread": "DDP101", "dropped": "DDP102", "detached": "DDP103", "no_grad": "DDP103", "number": "DDP103"}
HERE_OR_THERE = {"on_rank_0": lambda rank, step: rank == 0, "in_step_1": lambda rank, step: step == 1}
MODES = (*ABSENT, *HERE_OR_THERE, "used", "zeroed", "lost", "frozen")
STEPS = 2


class Lose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


class Patchwork(nn.Module):
    """Blocks of which each takes part in its own way; `ties` gives a block the weight of an earlier one."""

    def __init__(self, modes: tuple[str, ...], ties: tuple[int | None, ...]) -> None:
        super().__init__()
        self.modes = modes
        self.blocks = nn.ModuleDict({"base": nn.Linear(3, 3)})
        for index, (mode, tie) in enumerate(zip(modes, ties, strict=True)):
            block = nn.Linear(3, 3, bias=False)
            if tie is not None and tie < index:
                block.weight = self.blocks[f"b{'abcdef'[tie]}"].weight
            elif mode == "frozen":
                block.requires_grad_(False)
            self.blocks[f"b{'abcdef'[index]}"] = block

    def forward(self, x: Any, step: int) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        total = self.blocks["base"](x).tanh()
        for mode, block in zip(self.modes, list(self.blocks.values())[1:], strict=True):
            if mode == "unread" or (mode in HERE_OR_THERE and not HERE_OR_THERE[mode](rank, step)):
                continue
            if mode == "lost":
                total = total + Lose.apply(x, block.weight)
                continue
            with torch.set_grad_enabled(mode != "no_grad"):
                made = block(x)
            if mode != "dropped":
                made = made.detach() if mode == "detached" else made.sum().item() if mode == "number" else made
                total = total + (0.0 * made if mode == "zeroed" else made)
        return total


def patchwork_recipe(modes: tuple[str, ...], ties: tuple[int | None, ...], seed: int, find_unused: bool) -> Recipe:
    def batch(step: int) -> Any:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * seed + step))
        return {"x": x, "step": torch.full((4,), step)}

    def loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"], int(batch["step"][0])) - 1).square().mean()

    kwargs = {"find_unused_parameters": True} if find_unused else {}
    return Recipe(model=lambda: Patchwork(modes, ties), batch=batch, loss=loss, ddp_kwargs=kwargs)


def truth_on_a_rank(recipe: Recipe) -> list[dict[str, str]]:
    """What plain autograd says, step by step, of every parameter that requires grad, under its first name."""
    model = recipe.model()
    said = []
    for step in range(STEPS):
        model.zero_grad()
        recipe.loss(model, recipe.local_batch(recipe.batch(step), dist.get_rank(), dist.get_world_size())).backward()
        of_step = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                of_step[name] = "none" if gradient is None else "some" if bool(gradient.count_nonzero()) else "zero"
        said.append(of_step)
    return said


def evidence_on_a_rank(recipe: Recipe) -> tuple[list[StepEvidence], WrapperFacts, dict[str, tuple[str, ...]]]:
    """What the phases of a check gather on this rank."""
    model_build.build(recipe, 0)
    facts, gathered = model_build.wrap().facts, []
    for step in range(STEPS):
        local.begin_step(step, None)
        gathered.append(local.local_step(step).explained(repeated_step.explain(step)).evidence)
    rank_state.rank_state().stack.close()
    return gathered, facts, model_build.aliases()


def expected_codes(
    truth: list[list[dict[str, str]]], users: dict[str, set[str]], find_unused: bool
) -> dict[str, set[str]]:
    """By parameter, the codes of which it must have one; parameters of which nothing must be said are left out."""
    expected: dict[str, set[str]] = {}
    for name in truth[0][0]:
        table = [[of_rank[step][name] for of_rank in truth] for step in range(STEPS)]
        seen = {state for row in table for state in row}
        absent = {ABSENT[mode] for mode in users[name] if mode in ABSENT}
        if "none" in seen and "lost" in users[name]:
            expected[name] = {"DDP108"}
        elif seen == {"none"}:
            expected[name] = absent
        elif "none" in seen and not find_unused:
            expected[name] = {"DDP104"} if any(len(set(row)) > 1 for row in table) else {"DDP105"}
        elif seen == {"zero"}:
            expected[name] = {"DDP107"}
    return expected


modes_of_blocks = st.lists(st.tuples(st.sampled_from(MODES), st.none() | st.integers(0, 3)), min_size=1, max_size=5)


def said_of(findings: Sequence[Finding]) -> dict[str, set[str]]:
    said: dict[str, set[str]] = {}
    for finding in findings:
        for name in finding.subjects:
            said.setdefault(name, set()).add(finding.code)
    said.pop("find_unused_parameters", None)
    return said


def assert_right(said: dict[str, set[str]], expected: dict[str, set[str]]) -> None:
    assert set(said) == set(expected), (said, expected)
    for name, codes in said.items():
        assert len(codes) == 1 and codes <= expected[name], (name, said, expected)


@pytest.mark.ddp(timeout=60, reuse="module")
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=modes_of_blocks, seed=st.integers(0, 5), find_unused=st.booleans())
def test_verdicts_agree_with_plain_autograd(
    ddp_world: DDPWorld, blocks: list[tuple[str, int | None]], seed: int, find_unused: bool
) -> None:
    recipe, users, aliases = patchwork(blocks, seed, find_unused)
    truth = ddp_world.run(truth_on_a_rank, recipe)
    gathered = ddp_world.run(evidence_on_a_rank, recipe)
    facts = gathered[0][1]
    evidence = [item for of_rank, _, _ in gathered for item in of_rank]
    assert gathered[0][2] == {names[0]: names for names in aliases.values() if len(names) > 1}
    assert_right(said_of(judge(evidence, facts)), expected_codes(truth, users, find_unused))


def patchwork(
    blocks: Sequence[tuple[str, int | None]], seed: int, find_unused: bool
) -> tuple[Recipe, dict[str, set[str]], dict[int, tuple[str, ...]]]:
    """A recipe, in which ways each of its parameters is used, and all names of each."""
    modes, ties = zip(*blocks, strict=True)
    recipe = patchwork_recipe(modes, ties, seed, find_unused)
    model = recipe.model()
    aliases = all_names(model)
    ways = {f"blocks.b{'abcdef'[index]}.weight": mode for index, mode in enumerate(modes)}
    users = {names[0]: {ways.get(name, "used") for name in names} for names in aliases.values()}
    return recipe, users, aliases


@pytest.mark.slow
@pytest.mark.ddp(timeout=60, reuse="module")
@pytest.mark.parametrize("seed", range(3))
def test_the_verdicts_of_a_whole_check_agree_with_plain_autograd(ddp_world: DDPWorld, seed: int) -> None:
    choose = random.Random(seed)
    blocks = [(choose.choice(MODES), choose.choice([None, None, 0, 1])) for _ in range(5)]
    recipe, users, aliases = patchwork(blocks, seed, find_unused=seed % 2 == 1)
    truth = ddp_world.run(truth_on_a_rank, recipe)
    first = {name: names[0] for names in aliases.values() for name in names}
    report = check(recipe, steps=STEPS)
    found = [finding for finding in report.findings if finding.code.startswith("DDP10")]
    said = {first.get(name, name): codes for name, codes in said_of(found).items()}
    assert report.error is None, report.error
    assert_right(said, expected_codes(truth, users, find_unused=seed % 2 == 1))
