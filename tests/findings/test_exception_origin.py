"""An exception is told as the target's only where the target's code, or torch called by it, has raised."""

import textwrap
from pathlib import Path

import pytest

from ddpcheck import FindingsError, check, check_matrix
from ddpcheck.findings.errors import BugError, RankError, RankFailure, TargetError, UsageError
from ddpcheck.findings.report import Report
from ddpcheck.findings.tracebacks import as_bug, is_misuse, is_own_bug
from ddpcheck.findings.wording import join_names

torch = pytest.importorskip("torch")
nn = torch.nn

SENTENCE = "this is a bug in ddpcheck, not in the target: please report it with the traceback"


def raised(function) -> Exception:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def boom() -> None:
    raise KeyError("mine")


def around_ours() -> None:
    try:
        join_names(3)
    except TypeError as error:
        raise RuntimeError("forward failed") from error


def with_hook_of_ours() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: join_names(3))
    weight.sum().backward()


@pytest.mark.parametrize("function", [lambda: join_names(3), around_ours, with_hook_of_ours])
def test_what_only_code_of_ddpcheck_has_raised_is_a_bug_of_ddpcheck(function) -> None:
    assert is_own_bug(raised(function))


def wrong_call_under_a_mode() -> None:
    from ddpcheck.gather.autograd.gradient_paths import PathRecorder

    with PathRecorder(nn.Linear(2, 2), []):
        torch.ones(2) @ torch.ones(3)


def wrong_call_with_silenced_numbers() -> None:
    from ddpcheck.gather.state.randomness import QuietRandomness

    with QuietRandomness():
        torch.rand(2).multinomial(5)


def backward_through_a_freed_graph() -> None:
    from ddpcheck.gather.ddp.loop_events import count_backwards
    from ddpcheck.gather.steps.training_step import run_backward

    loss = torch.ones(2, requires_grad=True).square().sum()
    with count_backwards():
        run_backward(loss)
        run_backward(loss)


def endless() -> None:
    from ddpcheck.gather.autograd.gradient_paths import PathRecorder

    def again(depth: int) -> None:
        torch.ones(1).add(1)
        again(depth + 1)

    with PathRecorder(nn.Linear(2, 2), []):
        again(0)


def a_name_that_the_package_has_not() -> None:
    import ddpcheck

    ddpcheck.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "function",
    [
        boom,
        wrong_call_under_a_mode,
        wrong_call_with_silenced_numbers,
        backward_through_a_freed_graph,
        endless,
        a_name_that_the_package_has_not,
    ],
)
def test_what_torch_says_to_the_target_is_the_targets_own(function) -> None:
    assert not is_own_bug(raised(function))


def test_a_public_function_that_refuses_is_misused_and_a_wrong_recipe_is_wrong_usage() -> None:
    from ddpcheck import Recipe, allreduce_grads

    def wrong_recipe() -> None:
        Recipe(model=3, batch=3, loss=3)

    refused = raised(lambda: allreduce_grads(3))
    assert isinstance(refused, UsageError) and is_misuse(refused) and not is_own_bug(refused)
    assert not is_misuse(raised(wrong_recipe))


def test_calling_the_target_keeps_our_own_exceptions_apart() -> None:
    from ddpcheck.recipe.recipe import call_user

    with pytest.raises(TargetError, match="model\\(\\) raised ValueError"):
        call_user("model()", int, "a")  # no frame of the target's at all
    with pytest.raises(TypeError):
        call_user("model()", lambda: join_names(3))


def test_a_bug_is_told_with_its_line_and_the_whole_traceback() -> None:
    bug = as_bug(raised(lambda: join_names(3)), "step 0: forward")
    assert isinstance(bug, BugError) and bug.exit_code == 2
    assert str(bug).startswith("ddpcheck itself raised TypeError: ") and str(bug).endswith(SENTENCE)
    assert "(ddpcheck/findings/wording.py:" in str(bug) and "step 0: forward" in str(bug)
    assert "in join_names" in bug.detail


# On ranks, in the single process, in judges: recipes that break a part of ddpcheck where they are loaded

RECIPE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.idle = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))) {idle}

def model():
    return Net()

def batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

def loss(model, batch):
    return model(batch).square().{reduce}()
"""


@pytest.fixture
def sabotaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check a recipe that breaks what a line of Python says; healthy but for what is asked for."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, *, unused: bool = False, reduce: str = "mean", how=check, **options):
        text = RECIPE.format(idle="" if unused else "+ self.idle(x)", reduce=reduce)
        (tmp_path / "broken_recipe.py").write_text(text + textwrap.dedent(line), encoding="utf-8")
        return how("broken_recipe.py", **options)

    return run


def assert_bug(report: Report, *words: str) -> None:
    assert report.error is not None and report.exit_code() == 2
    assert report.error.message.endswith(SENTENCE) and "ddpcheck itself raised" in report.error.message
    assert "ddpcheck/" in report.error.detail and "Traceback" in report.error.detail
    assert not [f for f in report.findings if f.code == "DDP401"]
    assert all(word in report.error.message for word in words)


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def status(report: Report, name: str) -> str:
    return next(result.status for result in report.checks if result.name == name)


@pytest.mark.slow
def test_a_missing_gradient_that_cannot_be_explained_is_told_without_its_cause(sabotaged) -> None:
    report = sabotaged(
        "import ddpcheck.gather.autograd.gradient_paths as p; p.PathRecorder.explain = None", unused=True
    )
    assert_bug(report, "'NoneType' object is not callable", "ddpcheck/gather/autograd/gradient_paths.py:")
    assert codes(report) == ["DDP102"] and "the cause is unknown" in report.findings[0].message
    assert any("why gradients are missing: not known" in note for note in report.world["notes"])
    assert status(report, "parity") == "passed"


@pytest.mark.slow
def test_a_difference_whose_analysis_fails_is_told_all_the_same(sabotaged) -> None:
    report = sabotaged("import ddpcheck.gather.phases.shard_analysis as a; a.fit = None", reduce="sum")
    assert_bug(report, "ddpcheck/gather/phases/shard_analysis.py:")
    assert [f for f in report.findings if f.severity.value == "error"] and status(report, "parity") == "failed"
    assert len({entry.step for entry in report.parity if entry.reference == "single-process"}) == 3


@pytest.mark.slow
def test_a_bug_in_the_single_process_leaves_the_reducer_compared(sabotaged) -> None:
    report = sabotaged("import ddpcheck.gather.phases.single_process as r; r.tolerances = None")
    assert_bug(report, "ddpcheck/gather/phases/single_process.py:")
    assert (status(report, "reducer"), status(report, "parity")) == ("passed", "skipped") and codes(report) == []


def test_a_bug_on_ranks_is_not_told_as_the_targets(sabotaged) -> None:
    report = sabotaged("import ddpcheck.gather.phases.local_step as l; l.LossGraph = None")
    assert_bug(report, "rank 0: ", "ddpcheck/gather/phases/local_step.py:")
    assert codes(report) == []


def test_a_bug_in_a_hook_that_the_target_calls_is_ours(sabotaged) -> None:
    report = sabotaged("import ddpcheck.gather.state.module_description as o; o.Origins.note = None")
    assert_bug(report, "ddpcheck/gather/state/module_description.py:")


@pytest.mark.parametrize("judge", ["judge_reducer", "judge_single_process"])
def test_a_judge_that_fails_gives_no_tick_and_the_others_go_on(
    sabotaged, monkeypatch: pytest.MonkeyPatch, judge: str
) -> None:
    from ddpcheck.report.checking import judging

    monkeypatch.setattr(judging, judge, lambda *_args: join_names(3))
    report = sabotaged("", reduce="sum")
    assert_bug(report)
    assert status(report, "reducer" if judge == "judge_reducer" else "parity") == "error"
    assert status(report, "parameters") == "passed" and ("DDP305" in codes(report)) == (judge == "judge_reducer")


@pytest.mark.slow
def test_a_row_of_the_matrix_that_fails_by_a_bug_is_no_verdict_on_the_options(sabotaged) -> None:
    line = "import ddpcheck.gather.phases.ddp_step as d; d.against_average = None"
    matrix = sabotaged(line, how=check_matrix, steps=1, step_times=False)
    assert matrix.exit_code() == 2 and SENTENCE in matrix.error.message
    assert {row.verdict for row in matrix.rows} == {"skipped"}
    assert not [advice for advice in matrix.advice if advice.kind in ("own", "fault")]


@pytest.mark.slow
def test_parity_cannot_be_asserted_over_a_bug(sabotaged) -> None:
    from ddpcheck import assert_parity

    with pytest.raises(FindingsError, match="this is a bug in ddpcheck"):
        sabotaged("import ddpcheck.gather.phases.single_process as r; r.tolerances = None", how=assert_parity)


def test_an_assertion_on_parameters_that_fails_by_a_bug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpcheck import assert_no_anomalous_params
    from ddpcheck.testing.assertions import on_rank as parts

    model = nn.Linear(2, 1)
    monkeypatch.setattr(parts, "detect_anomalous_params", None)
    with pytest.raises(BugError, match=r"ddpcheck/testing/assertions/on_rank\.py:.*this is a bug in ddpcheck"):
        assert_no_anomalous_params(model(torch.ones(1, 2)).sum(), model)
    with pytest.raises(UsageError, match=r"model is an nn\.Module, not str"):
        assert_no_anomalous_params(model(torch.ones(1, 2)).sum(), "model")


def test_a_target_that_calls_ddpcheck_wrongly_has_itself_to_blame(sabotaged) -> None:
    report = sabotaged(
        """
        def loss(model, batch):
            import ddpcheck
            ddpcheck.allreduce_grads(3)
        """
    )
    assert report.exit_code() == 3 and "loss(model, batch) in step 0 raised WrongTypeError" in report.error.message
    assert "broken_recipe.py:" in report.error.message and "bug" not in report.error.message


def test_the_error_of_a_world_gives_way_to_ours_that_the_first_rank_raised_and_to_a_bug_of_ours() -> None:
    with pytest.raises(TargetError, match="no model"):
        RankError("failed", [RankFailure(0, "raised", "", 0.0, exception=TargetError("no model"))]).raise_cause()
    with pytest.raises(BugError, match=SENTENCE):
        RankError("failed", [RankFailure(0, "raised", "", 0.0, bug=SENTENCE)]).raise_cause()
    RankError("failed", [RankFailure(0, "raised", "", 0.0, exception=ValueError())]).raise_cause()
    RankError("no rank is to blame").raise_cause()
