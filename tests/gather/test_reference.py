"""The single process: what it needs, what is said when it cannot run, and what it finds out about a difference."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.report import CheckResult, Report
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import check


class Net(nn.Module):
    def __init__(self, norm: nn.Module | None = None, *, communicates: bool = False) -> None:
        super().__init__()
        self.norm, self.head, self.communicates = norm or nn.Identity(), nn.Linear(4, 1), communicates

    def forward(self, x: Any) -> Any:
        if self.communicates:
            dist.all_reduce(torch.zeros(1))
        return self.head(self.norm(x))


def batch(step: int) -> Any:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(step))


def mean_of_squares(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def run(model: Any, loss: Any = mean_of_squares, **options: Any) -> Report:
    recipe = Recipe(
        model=model,
        batch=options.pop("batch", lambda step: batch(step)[:8]),
        loss=loss,
        shard=options.pop("shard", None),
    )
    return check(recipe, steps=2, timeout=20, **options)


def parity_of(report: Report) -> CheckResult:
    return next(check for check in report.checks if check.name == "parity")


def test_a_model_that_needs_a_process_group_gets_one_of_a_single_rank() -> None:
    report = run(lambda: Net(nn.SyncBatchNorm(4), communicates=True))
    assert (report.status, parity_of(report).status) == ("clean", "passed"), parity_of(report)
    assert any("process group of one" in note for note in report.world["notes"])


def test_where_the_single_process_cannot_run_the_rest_is_still_checked() -> None:
    def loss(model: Any, x: Any) -> Any:
        if len(x) == 8:
            raise MemoryError("the whole batch does not fit")
        return mean_of_squares(model, x)

    report = run(Net, loss)
    assert parity_of(report).status == "skipped" and "the whole batch does not fit" in parity_of(report).detail
    assert report.error is None and {c.status for c in report.checks if c.name != "parity"} == {"passed"}
    assert {entry.reference for entry in report.parity} == {"local"}


def test_a_batch_that_does_not_divide_is_checked_with_equal_shards_and_a_note_says_so() -> None:
    report = run(Net, batch=batch)
    assert report.findings == () and report.error is None
    (note,) = report.world["notes"]
    assert "batch of 9 samples does not divide by 2 ranks" in note and "without the last 1" in note
    assert [(entry.step, entry.reference, entry.parameter) for entry in report.parity] == [
        (step, reference, name)
        for step in range(2)
        for reference in ("local", "single-process")
        for name in ("head.bias", "head.weight")
    ]
    assert all(0 <= entry.relative_error <= entry.tolerance < 1e-3 for entry in report.parity)
