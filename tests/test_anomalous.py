"""DDP1xx from hand-made evidence, each with a clean twin, and the same question asked in any loop."""

import os
from typing import Any

import pytest

from ddpcheck.anomalous import detect_anomalous_params, judge_parameters, judge_uninitialised, zero_everywhere
from ddpcheck.errors import UsageError
from ddpcheck.evidence import PathEnd, StepEvidence, Unregistered, WrapperFacts
from ddpcheck.findings import Finding, Location, Severity
from ddpcheck.wording import Names

torch = pytest.importorskip("torch")
nn = torch.nn

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


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


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


def test_a_gradient_that_is_always_zero_is_a_warning_unless_it_wakes() -> None:
    evidence = two_ranks(zero=("extra.weight",))
    finding = only(judge(evidence))
    assert (finding.code, finding.severity, finding.subjects) == ("DDP107", Severity.WARNING, ("extra.weight",))
    assert judge(evidence, awake=frozenset({"extra.weight"})) == []


def test_a_gradient_that_is_zero_in_some_steps_or_on_some_ranks_is_fine() -> None:
    assert judge([step_evidence(0, zero=("extra.weight",)), step_evidence(1)]) == []
    assert judge([step_evidence(0, 0, zero=("extra.weight",)), step_evidence(0, 1)]) == []


def test_where_all_gradients_are_zero_nothing_was_compared_and_that_is_another_rule() -> None:
    assert judge(two_ranks(zero=ALL)) == []


def test_leaves_that_nobody_registered_are_one_finding_a_holder() -> None:
    leaves = (
        Unregistered("blocks[0].weight", (2, 2), HERE),
        Unregistered("blocks[1].weight", (2, 2)),
        Unregistered("raw", (3,)),
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
    evidence = two_ranks(output_type="Output", invisible=())
    assert only(judge(evidence, FINDS_UNUSED)).code == "DDP112"
    assert only(judge(evidence, FINDS_UNUSED)).subjects == ("Output",)
    assert judge(evidence, PLAIN) == []
    assert [f.code for f in judge(evidence, WrapperFacts(is_ddp=False, find_unused_parameters=True))] == ["DDP109"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_parameters_that_the_search_cannot_see_are_marked_ready_twice(reentrant: bool) -> None:
    finding = only(judge(two_ranks(invisible=("head.weight",), reentrant=reentrant), FINDS_UNUSED))
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
