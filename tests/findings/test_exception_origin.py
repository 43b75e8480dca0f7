"""An exception is told as the target's only where the target's code, or torch called by it, has raised."""

from pathlib import Path

import pytest

from ddpcheck import check
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
    bug = as_bug(raised(lambda: join_names(3)), "step 0: forward")
    assert isinstance(bug, BugError) and bug.exit_code == 2 and "in join_names" in bug.detail
    assert str(bug).startswith("ddpcheck itself raised TypeError: ") and str(bug).endswith(SENTENCE)
    assert "(ddpcheck/findings/wording.py:" in str(bug) and "step 0: forward" in str(bug)


def wrong_call_under_a_mode() -> None:
    from ddpcheck.gather.autograd.gradient_paths import PathRecorder

    with PathRecorder(nn.Linear(2, 2), []):
        torch.ones(2) @ torch.ones(3)


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


@pytest.mark.parametrize("function", [boom, wrong_call_under_a_mode, backward_through_a_freed_graph, endless])
def test_what_torch_says_to_the_target_is_the_targets_own(function) -> None:
    assert not is_own_bug(raised(function))


def test_a_public_function_that_refuses_is_misused_and_a_wrong_recipe_is_wrong_usage() -> None:
    from ddpcheck import Recipe, allreduce_grads
    from ddpcheck.recipe.recipe import call_user

    def wrong_recipe() -> None:
        Recipe(model=3, batch=3, loss=3)

    refused = raised(lambda: allreduce_grads(3))
    assert isinstance(refused, UsageError) and is_misuse(refused) and not is_own_bug(refused)
    assert not is_misuse(raised(wrong_recipe))
    with pytest.raises(TargetError, match="model\\(\\) raised ValueError"):
        call_user("model()", int, "a")  # no frame of the target's at all
    with pytest.raises(TypeError):
        call_user("model()", lambda: join_names(3))


RECIPE = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 1)

def batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

def loss(model, batch):
    return model(batch).square().{reduce}()
"""


@pytest.fixture
def sabotaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check a recipe that breaks what a line of Python says; healthy where the loss is a mean."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, reduce: str = "mean") -> Report:
        (tmp_path / "broken_recipe.py").write_text(RECIPE.format(reduce=reduce) + line, "utf-8")
        return check("broken_recipe.py")

    return run


def assert_bug(report: Report, *words: str) -> None:
    assert report.error is not None and report.exit_code() == 2
    assert report.error.message.endswith(SENTENCE) and "ddpcheck itself raised" in report.error.message
    assert "ddpcheck/" in report.error.detail and "Traceback" in report.error.detail
    assert not [f for f in report.findings if f.code == "DDP401"]
    assert all(word in report.error.message for word in words)


def status(report: Report, name: str) -> str:
    return next(result.status for result in report.checks if result.name == name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gather.phases.local_step as m; m.LossGraph", ["rank 0: ", "ddpcheck/gather/phases/local_step.py:"]),
        ("gather.state.module_description as m; m.Origins.note", ["ddpcheck/gather/state/module_description.py:"]),
    ],
)
def test_a_bug_on_ranks_or_in_a_hook_is_ours(sabotaged, line: str, words: list[str]) -> None:
    report = sabotaged(f"import ddpcheck.{line} = None")
    assert_bug(report, *words)
    assert report.findings == ()


@pytest.mark.slow
def test_a_bug_in_an_analysis_leaves_the_rest_compared(sabotaged) -> None:
    report = sabotaged("import ddpcheck.gather.phases.shard_analysis as a; a.fit = None", reduce="sum")
    assert_bug(report, "ddpcheck/gather/phases/shard_analysis.py:")
    assert [f for f in report.findings if f.severity.value == "error"] and status(report, "parity") == "failed"
    report = sabotaged("import ddpcheck.gather.phases.single_process as r; r.tolerances = None")
    assert_bug(report, "ddpcheck/gather/phases/single_process.py:")
    assert (status(report, "reducer"), status(report, "parity"), report.findings) == ("passed", "skipped", ())


@pytest.mark.parametrize("judge", ["judge_reducer", "judge_single_process"])
def test_a_judge_that_fails_gives_no_tick_and_the_others_go_on(
    sabotaged, monkeypatch: pytest.MonkeyPatch, judge: str
) -> None:
    from ddpcheck.report.checking import judging

    monkeypatch.setattr(judging, judge, lambda *_args: join_names(3))
    report = sabotaged("", reduce="sum")
    assert_bug(report)
    assert status(report, "reducer" if judge == "judge_reducer" else "parity") == "error"
    codes = [finding.code for finding in report.findings]
    assert status(report, "parameters") == "passed" and ("DDP305" in codes) == (judge == "judge_reducer")


def test_an_assertion_on_parameters_that_fails_by_a_bug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpcheck import assert_no_anomalous_params
    from ddpcheck.testing.assertions import on_rank as parts

    model = nn.Linear(2, 1)
    monkeypatch.setattr(parts, "detect_anomalous_params", None)
    with pytest.raises(BugError, match=r"ddpcheck/testing/assertions/on_rank\.py:.*this is a bug in ddpcheck"):
        assert_no_anomalous_params(model(torch.ones(1, 2)).sum(), model)
    with pytest.raises(UsageError, match=r"model is an nn\.Module, not str"):
        assert_no_anomalous_params(model(torch.ones(1, 2)).sum(), "model")


def test_the_error_of_a_world_gives_way_to_ours_that_the_first_rank_raised_and_to_a_bug_of_ours() -> None:
    with pytest.raises(TargetError, match="no model"):
        RankError("failed", [RankFailure(0, "raised", "", 0.0, exception=TargetError("no model"))]).raise_cause()
    with pytest.raises(BugError, match=SENTENCE):
        RankError("failed", [RankFailure(0, "raised", "", 0.0, bug=SENTENCE)]).raise_cause()
    RankError("failed", [RankFailure(0, "raised", "", 0.0, exception=ValueError())]).raise_cause()
    RankError("no rank is to blame").raise_cause()
