"""DDP1xx from hand-made evidence, each with a clean twin, and the same question asked in any loop."""

import os
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from ddpcheck.anomalous import detect_anomalous_params
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import ParameterChange, PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import Names
from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.phases import local_step as local
from ddpcheck.gather.phases import model_build, rank_state, repeated_step
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.parameters.ddp107_zero_gradient_parameter import parameters_with_zero_gradients
from ddpcheck.rules.parameters.ddp110_uninitialised_parameter import judge_uninitialised
from ddpcheck.testing.fixture import DDPWorld
from tests.reports import codes, only

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


def two_ranks(steps: int = 3, **fields: Any) -> list[StepEvidence]:
    return [step_evidence(rank, step, **fields) for step in range(steps) for rank in range(2)]


def judge(evidence: list[StepEvidence], wrapper: WrapperFacts = PLAIN, **more: Any) -> list[Finding]:
    return judge_parameters(evidence, wrapper, more.pop("names", Names()), **more)


EXTRA, HEAD, ENCODER = ("extra.weight", "extra.bias"), ("head.weight",), ("encoder.weight",)
WEIGHT = ("extra.weight",)
BLOCKS = ("blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "head.weight")
PAIRS = [(rank, step) for step in range(3) for rank in range(2)]
NOT_DDP = WrapperFacts(is_ddp=False)
SPARSE = frozenset(WEIGHT)
CUT, CUT_LATER = (PathEnd("cut", "detach()", Location("model.py", number), "encoder") for number in (7, 8))
LEAVES = (
    UnregisteredTensor("blocks[0].weight", (2, 2), HERE),
    UnregisteredTensor("blocks[1].weight", (2, 2)),
    UnregisteredTensor("raw", (3,)),
)


def where(
    state: str, names: tuple[str, ...], places: Collection[tuple[int, int]], steps: int = 3
) -> list[StepEvidence]:
    """Two ranks, with this state of these parameters at these places, which are (rank, step)."""
    pairs = [(rank, step) for step in range(steps) for rank in range(2)]
    return [step_evidence(*pair, **{state: names if pair in places else ()}) for pair in pairs]


def in_steps(*steps: int) -> list[StepEvidence]:
    return where("missing", WEIGHT, [(rank, step) for rank in (0, 1) for step in steps])


def changed(what: str, *, missing: bool = True, by: str = "", ranks: tuple[int, ...] = (0, 1)) -> list[StepEvidence]:
    """The head is changed in step 1, on these ranks."""
    change = {"head.weight": ParameterChange(what, HERE, by)}
    return [
        step_evidence(
            *(rank, step), missing=HEAD if missing and step else (), changed=change if step and rank in ranks else {}
        )
        for rank, step in PAIRS
    ]


def blocks_missing(*places: tuple[int, int, int]) -> list[StepEvidence]:
    """Two ranks, three steps; `places` are (block, rank, step)."""
    evidence = []
    for rank, step in PAIRS:
        missing = [name for block, name in enumerate(BLOCKS) if (block, rank, step) in places]
        states = {name: "missing" if name in missing else "contributes" for name in BLOCKS}
        evidence.append(StepEvidence(rank, step, states, dict.fromkeys(missing, PathEnd("unused"))))
    return evidence


def on_both(*places: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Blocks and steps, on both ranks."""
    return [(block, rank, step) for block, step in places for rank in (0, 1)]


def ended(**ends: PathEnd) -> list[StepEvidence]:
    """One rank, on which these parameters are missing."""
    by_name = {name.replace("_", "."): end for name, end in ends.items()}
    return [StepEvidence(0, 0, dict.fromkeys(by_name, "missing"), by_name)]


UNUSED = two_ranks(missing=EXTRA)
UNUSED_WEIGHT = two_ranks(missing=WEIGHT)
ON_RANK_1_IN_STEP_2 = where("missing", WEIGHT, [(1, 2)])
ZERO = two_ranks(zero=WEIGHT)
HIDDEN = two_ranks(output_type="Output", hidden_from_ddp=())
TWICE = two_ranks(arrivals={"head.weight": 2}, reentrant=True)
CUT_IN_ENCODER = "cut by detach() at model.py:7 (in module encoder)"
NO_TURN = on_both((0, 0), (0, 1), (0, 2))

CLEAN: dict[str, tuple[list[StepEvidence], WrapperFacts]] = {
    "all contributes": (two_ranks(), PLAIN),
    "all contributes, no DDP": (two_ranks(), NOT_DDP),
    "no evidence": ([], PLAIN),
    "on a rank, which is searched for": (ON_RANK_1_IN_STEP_2, FINDS_UNUSED),
    "in some steps, which is searched for": (in_steps(1), FINDS_UNUSED),
    "some unused, which is searched for": ([step_evidence(0, missing=WEIGHT), step_evidence(1)], FINDS_UNUSED),
    "removed and not waited for": (changed("removed", missing=False), PLAIN),
    "frozen and not waited for": (changed("frozen", missing=False), PLAIN),
    "zero on a rank": ([step_evidence(0, zero=WEIGHT), step_evidence(1)], PLAIN),
    "all zero, which is another rule": (two_ranks(zero=ALL), PLAIN),
    "an output without tensors, of which none are looked for": (HIDDEN, PLAIN),
    "a gradient that arrives twice, static": (TWICE, STATIC),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_healthy_is_clean(name: str) -> None:
    assert judge(*CLEAN[name]) == []


def told(evidence: list[StepEvidence], code: str, *words: str, wrapper: WrapperFacts = PLAIN, **expected: Any) -> Any:
    """Evidence, the wrapper, the attributes of the only finding, and parts of its text."""
    return evidence, wrapper, {"code": code, **expected}, words


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
LOOSE = {"wrapper": FINDS_UNUSED}
SPARSE_LOOSE = WrapperFacts(find_unused_parameters=True, sparse=SPARSE)
UNUSED_ON_ALL: dict[str, Any] = {"severity": ERROR, "subjects": EXTRA, "ranks": (), "steps": ()}
BLOCK_CUTS = [PathEnd("cut", "torch.no_grad()", Location("model.py", number), "", HERE) for number in (8, 9)]
IN_NO_GRAD = ended(extra_weight=BLOCK_CUTS[0], encoder_weight=BLOCK_CUTS[1])
BY_TURNS = where("missing", WEIGHT, [(0, 0), (1, 1), (0, 2), (1, 3)], steps=4)
LEAF_ON_RANK_1 = [step_evidence(0), step_evidence(1, unregistered=LEAVES[2:])]
BY_CHANCE = blocks_missing((0, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1))
CHANGES = ("replaced", "removed", "frozen", "unfrozen", "cast or moved")
IN_FORWARD: dict[str, Any] = {"subjects": HEAD, "ranks": (), "location": HERE}
HIDDEN_HEAD = two_ranks(hidden_from_ddp=HEAD)
FOUND = {
    "never read": told(UNUSED, "DDP101", "Expected to have finished reduction", **UNUSED_ON_ALL),
    "never read, searched for": told(UNUSED, "DDP101", "find_unused_parameters=True", severity=WARNING, **LOOSE),
    "never read, static": told(UNUSED, "DDP101", "static_graph=True", severity=WARNING, wrapper=STATIC),
    "cut": told(two_ranks(missing=ENCODER, end=CUT), "DDP103", CUT_IN_ENCODER, severity=ERROR),
    "cut in one block": told(IN_NO_GRAD, "DDP103", "\ntorch.no_grad() begins at model.py:7\n"),
    "on a rank in a step": told(ON_RANK_1_IN_STEP_2, "DDP104", "rank 1 in step 2", ranks=(1,), steps=(2,)),
    "on each rank in turn": told(BY_TURNS, "DDP104", ranks=()),
    "in the first step": told(in_steps(0), "DDP105", severity=ERROR, ranks=(), steps=(0,)),
    "in the last step": told(in_steps(2), "DDP105", "no forward follows step 2", steps=(2,)),
    "lost on a rank": told([step_evidence(0), step_evidence(1, lost=HEAD)], "DDP108", subjects=HEAD, ranks=(1,)),
    "a tensor on a rank": told(LEAF_ON_RANK_1, "DDP106", ranks=(1,)),
    "sparse, searched for": told(UNUSED_WEIGHT, "DDP101", "sparse=False", severity=ERROR, wrapper=SPARSE_LOOSE),
    **{
        what: told(changed(what), "DDP503", f"was {what} in the forward pass of step 1", **IN_FORWARD)
        for what in CHANGES
    },
    "replaced by another": told(
        changed("replaced", by="body.weight"), "DDP503", "replaced by body.weight in the forward"
    ),
    "replaced on a rank": told(changed("replaced", ranks=(1,)), "DDP503", ranks=(1,)),
    "blocks that are skipped by chance": told(
        *(BY_CHANCE, "DDP104", "\nIn step 0 blocks.0.weight did not contribute on rank 0, and blocks.1.weight"),
        "\nstep 1: blocks.1.weight did not contribute on any rank\n",
        **{"ranks": (), "subjects": BLOCKS[:2]},
    ),
    "heads that take turns": told(
        *(blocks_missing(*on_both((1, 0), (0, 1), (1, 2))), "DDP105", "each in different ones"),
        "\nsteps 0 and 2: blocks.1.weight did not contribute on any rank\n",
    ),
    "a block that no step took": told(blocks_missing(*NO_TURN), "DDP101", severity=WARNING, **LOOSE),
    "an output without tensors, no DDP": told(HIDDEN, "DDP109", wrapper=replace(FINDS_UNUSED, is_ddp=False)),
    "hidden": told(HIDDEN_HEAD, "DDP406", subjects=HEAD, **LOOSE),
    "a gradient that arrives twice": told(TWICE, "DDP406", "2 times", "use_reentrant=False", subjects=HEAD),
}


def text_of(finding: Finding) -> str:
    return "\n".join(["", finding.message, *finding.evidence, finding.fix, ""])


@pytest.mark.parametrize("name", FOUND)
def test_what_is_wrong_is_one_finding(name: str) -> None:
    evidence, wrapper, expected, words = FOUND[name]
    finding = only(judge(evidence, wrapper))
    assert {attribute: getattr(finding, attribute) for attribute in expected} == expected
    text = text_of(finding)
    assert not [part for part in words if part not in text]
    assert name not in CHANGES or ("None" not in finding.message and "{" not in finding.message)
    if name == "sparse, searched for":
        assert "pass find_unused_parameters" not in finding.fix
        assert "Expected sparse gradient to be defined" in text
    assert name != "hidden" or "re-entrant checkpoint" not in finding.evidence[0]


def test_two_modules_that_are_never_read_are_two_findings_and_so_are_paths_cut_at_two_lines() -> None:
    findings = judge(two_ranks(missing=(*EXTRA, *ENCODER)))
    assert sorted(finding.subjects for finding in findings) == [ENCODER, EXTRA]
    assert len(judge(ended(extra_weight=CUT, encoder_weight=CUT_LATER))) == 2


def test_all_names_of_a_tied_parameter_and_its_line_are_told() -> None:
    names = Names({"extra.weight": ("extra.weight", "tied.weight")}, {"extra.weight": HERE})
    finding = only(judge(UNUSED_WEIGHT, names=names))
    assert finding.subjects == ("extra.weight", "tied.weight") and finding.location == HERE


def test_the_function_that_lost_a_gradient_is_named_with_its_line() -> None:
    end = PathEnd("lost", "Scale.backward()", HERE)
    by_name = {
        finding.subjects: finding.message
        for finding in judge([StepEvidence(0, 0, dict.fromkeys(ALL, "lost"), {"extra.weight": end})])
    }
    assert "Scale.backward() at model.py:7 returns None" in by_name["extra.weight",]
    assert "a custom autograd Function" in by_name[tuple(name for name in ALL if name != "extra.weight")]


def test_zero_gradients_are_grouped_by_where_they_become_zero_and_are_none_if_they_wake() -> None:
    zero = PathEnd("zero", "mul()", HERE)
    ends = {"extra.weight": zero, "encoder.weight": zero}
    finding = only(judge(two_ranks(zero=(*WEIGHT, *ENCODER)), zero_ends=ends))
    assert "it becomes zero in mul() at model.py:7" in finding.message
    assert judge(ZERO, nonzero_when_perturbed=frozenset(WEIGHT)) == [] and parameters_with_zero_gradients([]) == []


def test_leaves_that_are_not_registered_are_one_finding_a_holder() -> None:
    by_list, by_tensor = judge(two_ranks(unregistered=LEAVES))
    expected = ("DDP106", ("blocks[0].weight", "blocks[1].weight"), HERE)
    assert (by_list.code, by_list.subjects, by_list.location) == expected
    assert by_tensor.subjects == ("raw",) and "3" in by_tensor.evidence[0] and by_tensor.ranks == ()
    late = UnregisteredTensor("late.weight", (2, 2), HERE, created_in_forward=True)
    created, listed = judge(two_ranks(unregistered=(late, LEAVES[1])))
    assert (created.code, listed.code) == ("DDP106", "DDP106") and created.fix != listed.fix
    assert "created in the forward pass" in created.message and "created" not in listed.message


@pytest.mark.parametrize("what", ["removed", "frozen"])
def test_what_is_gone_is_no_change_where_the_wrapper_tolerates_it(what: str) -> None:
    tolerant = judge(changed(what), WrapperFacts(find_unused_parameters=True))
    assert "DDP503" not in codes(tolerant) and "DDP503" not in codes(judge(changed("replaced"), NOT_DDP))


def test_a_block_that_no_step_took_is_a_note_where_others_of_its_list_take_turns() -> None:
    evidence = blocks_missing(*NO_TURN, (1, 0, 0), (1, 1, 0))
    (first,) = [finding for finding in judge(evidence, FINDS_UNUSED) if finding.code == "DDP101"]
    assert (first.subjects, first.severity) == (BLOCKS[:1], NOTE)
    assert any("check more steps" in fact for fact in first.evidence)
    assert {finding.code: finding.severity for finding in judge(evidence)}["DDP101"] is ERROR


def test_lazy_parameters_without_a_shape() -> None:
    assert judge_uninitialised([(), ()]) == []
    finding = only(judge_uninitialised([("head.weight",), ("head.weight", "head.bias")]))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP110", ("head.bias", "head.weight"), ())
    assert only(judge_uninitialised([(), ("head.weight",)])).ranks == (1,)


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


def test_a_loop_in_which_all_is_well_gets_an_empty_answer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    output = model(torch.ones(2, 3))
    for loss in (output.sum(), {"a": output.mean(), "b": [output.sum()]}, output):
        found = detect_anomalous_params(loss, model)
        assert not found and found.findings == ()
    frozen = TwoHeads()
    frozen.extra.requires_grad_(False)
    assert not detect_anomalous_params(frozen(torch.ones(2, 3)).sum(), frozen)


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


def test_a_loss_without_grad_is_wrong_usage() -> None:
    model = nn.Linear(3, 1)
    for loss in (model(torch.ones(1, 3)).detach(), 3.0, []):
        with pytest.raises(UsageError, match="requires grad"):
            detect_anomalous_params(loss, model)


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


@pytest.mark.ddp(timeout=60, reuse="module")
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=modes_of_blocks, seed=st.integers(0, 5), find_unused=st.booleans())
@example(blocks=[(mode, None) for mode in MODES[:4]], seed=0, find_unused=False)
@example(blocks=[(mode, None) for mode in MODES[4:8]], seed=1, find_unused=False)
@example(blocks=[("used", None), ("in_step_1", 0), *((mode, None) for mode in MODES[8:])], seed=2, find_unused=True)
def test_verdicts_agree_with_plain_autograd(
    ddp_world: DDPWorld, blocks: list[tuple[str, int | None]], seed: int, find_unused: bool
) -> None:
    modes, ties = zip(*blocks, strict=True)
    recipe = patchwork_recipe(modes, ties, seed, find_unused)
    aliases = all_names(recipe.model())
    ways = {f"blocks.b{'abcdef'[index]}.weight": mode for index, mode in enumerate(modes)}
    users = {names[0]: {ways.get(name, "used") for name in names} for names in aliases.values()}
    truth = ddp_world.run(truth_on_a_rank, recipe)
    gathered = ddp_world.run(evidence_on_a_rank, recipe)
    facts = gathered[0][1]
    evidence = [item for of_rank, _, _ in gathered for item in of_rank]
    assert gathered[0][2] == {names[0]: names for names in aliases.values() if len(names) > 1}
    said, expected = said_of(judge(evidence, facts)), expected_codes(truth, users, find_unused)
    assert set(said) == set(expected), (said, expected)
    for name, said_codes in said.items():
        assert len(said_codes) == 1 and said_codes <= expected[name], (name, said, expected)
