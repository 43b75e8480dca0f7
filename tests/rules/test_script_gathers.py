"""DDP309 in a loss over the features of all ranks: what is a constant in it, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from ddpcheck.findings.evidence.loop import GatheredConstant, OwnRowsReinserted
from ddpcheck.findings.evidence.script import LossDifferentiated, ScaledTerm
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding
from ddpcheck.record.loss.gather_recorder import GatherRecorder, _distinct_rows, _GatheredParts, _SampledGather
from ddpcheck.record.recording import Recording
from ddpcheck.rules.causes import find_causes
from ddpcheck.rules.registry import judge_view
from ddpcheck.trace.losses import Losses
from tests.reports import assert_says, codes

LINE = Location("train.py", 8)


def _gathered(features: torch.Tensor) -> _SampledGather:
    rows = _distinct_rows(features)
    assert rows is not None
    return _SampledGather("all_gather", LINE, (8, 3), rows, features.grad_fn)


def record(
    loss: torch.Tensor, gathered: list[_SampledGather], parts: list[_GatheredParts], step: int = 2, *watches: Any
) -> list[Any]:
    """Record a backward pass in an optimizer step."""
    recorded: list[Any] = []
    run = Recording(recorded.append)
    recorder = GatherRecorder(run)
    run.steps = recorder._step = step
    run.watches = [*watches]  # type: ignore[assignment]
    recorder._gathered, recorder._parts = gathered, parts
    recorder.note_backward(loss)
    loss.backward(retain_graph=True)
    return recorded


def test_it_takes_every_rank_in_several_steps_or_parameters_that_get_no_gradient() -> None:
    def judged(*constants: list[GatheredConstant]) -> list[Finding]:
        return judge_view(Losses([[], []], constants=[*constants]))

    first, second = (GatheredConstant(step, "all_gather", LINE, 8) for step in (1, 2))
    assert_says(judged([first, second], [first, second]), f"DDP309 ... at {LINE}")
    assert not judged([first, second], []) and not judged([first], [first])
    named = [replace(first, names=("0/head.weight", "0/head.bias"))]
    findings = judged(named, named)
    assert_says(findings, f"DDP309 ... ('head.weight', 'head.bias') ... at {LINE}")
    assert not judged(named, [])
    for name, kept in (("head.weight", ["DDP309"]), ("body.weight", ["DDP102", "DDP309"])):
        missing = make_finding("DDP102", [name], "The result does not reach the loss.")
        assert codes(find_causes([missing, *findings]).findings) == kept


@pytest.mark.parametrize(
    ("loss_of", "names"),
    [
        (lambda scale, own, every: (scale * every @ every.T).sum(), ("0/weight",)),
        (lambda scale, own, every: (scale * own @ every.T).sum(), ()),
    ],
)
def test_parameters_of_which_the_loss_has_what_was_gathered_alone(loss_of: Any, names: tuple[str, ...]) -> None:
    scale, weight = (torch.nn.Parameter(torch.ones(*size)) for size in ((1,), (5, 3)))
    watch = SimpleNamespace(numbered={id(scale): "0/scale", id(weight): "0/weight"})
    own = torch.randn(4, 5) @ (weight * torch.randn(5, 3))
    loss = loss_of(scale, own, torch.cat([own.detach(), torch.randn(4, 3)]))
    constants = record(loss, [_gathered(own)], [_GatheredParts(2, 0, (8, 3))], 0, watch)
    assert [constant.names for constant in constants] == [names]


def _features() -> torch.Tensor:
    return torch.randn(4, 5) @ torch.randn(5, 3, requires_grad=True)


@pytest.mark.parametrize(
    "logits",
    [
        lambda own, every: own @ every.T,
        lambda own, every: cosine_similarity(own[:, None], every[None], dim=-1),
        lambda own, every: normalize(own) @ (3 * normalize(every)).T,
        torch.cdist,
    ],
)
def test_the_distinct_rows_among_the_constants_of_a_loss(logits: Any) -> None:
    torch.manual_seed(0)
    features, others = _features(), torch.randn(4, 3)

    def constants(everything: torch.Tensor) -> int:
        loss = logits(features, everything).logsumexp(1).mean()
        recorded = record(loss, [_gathered(features)], [_GatheredParts(2, 0, (8, 3), "all_gather", LINE)])
        return sum(isinstance(entry, GatheredConstant) for entry in recorded)

    assert constants(torch.cat([features.detach(), others])) == 1
    assert constants(torch.cat([features, others])) == 0  # put back
    assert constants(torch.randn(8, 3)) == 0  # a queue
    assert constants(torch.cat([features.detach(), others, others])) == 0  # a queue that begins with these


@pytest.mark.parametrize("views", [1, 2])
def test_views_that_are_gathered_one_by_one_and_joined(views: int) -> None:
    torch.manual_seed(0)
    first, second = _features(), _features()
    gathered = [_gathered(features) for features in (first, second)][:views]
    bank = torch.cat([first.detach(), torch.randn(4, 3), second.detach(), torch.randn(4, 3)])
    loss = (first @ bank.T).logsumexp(1).mean()
    constants = [GatheredConstant(3, "all_gather", LINE, 8)] * (views - 1)
    assert record(loss, gathered, [_GatheredParts(2, 0, (8, 3))] * views, 3) == constants


def test_rows_that_are_all_alike_are_no_mark() -> None:
    assert _distinct_rows(torch.ones(4, 3)) is None and _distinct_rows(torch.randn(4, 1)) is None
    assert _distinct_rows(torch.zeros(4, 3)) is None


def test_what_hooks_have_packed_is_left_alone() -> None:
    features = _features()
    unpacked = []

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        unpacked.append(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
        loss = (features @ torch.randn(8, 3).T).mean()
    assert not record(loss, [_gathered(features)], [_GatheredParts(2, 0, (8, 3))])
    assert len(unpacked) == 1  # by the backward pass


def test_the_own_part_that_is_put_back() -> None:
    features, others, whole = _features(), torch.randn(4, 3), torch.randn(8, 3)

    def joined(everything: torch.Tensor) -> bool:
        loss = (features @ everything.T).logsumexp(1).mean()
        return bool(record(loss, [_gathered(features)], [_GatheredParts(2, 1, (8, 3), "all_gather", LINE)]))

    assert joined(torch.cat([others, features]))
    assert not joined(whole)
    whole[4:] = features
    assert joined(whole)
    assert not joined(torch.cat([features, others]))  # in the place of another rank
    assert not joined(torch.cat([features, features]))


class _Joined(torch.autograd.Function):
    """Gathered rows on rank 1 of 2; backward scales the rank's part of the gradient in place, as `all_reduce` does."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, other: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.factor = factor
        return other.clone(), own.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[1].mul_(ctx.factor), None, None


def _arrival(factor: float, *, own_rows: bool) -> list[OwnRowsReinserted]:
    torch.manual_seed(0)
    features = _features()
    every = torch.cat(_Joined.apply(features, torch.randn(4, 3), factor))
    loss = ((features if own_rows else every) @ every.T).logsumexp(1).mean()
    return record(loss, [], [_GatheredParts(2, 1, (8, 3), "all_gather", LINE, features.grad_fn)])


def test_what_arrives_at_a_gather_of_the_scripts_own_and_what_goes_on() -> None:
    (whole,) = _arrival(1.0, own_rows=False)
    (own,) = _arrival(1.0, own_rows=True)
    assert whole.factor == own.factor == 1.0 and whole.full_gradient and own.full_gradient
    assert own.uses_own_rows and not whole.uses_own_rows
    assert whole.location is not None and whole.location.path.endswith("test_script_gathers.py")
    assert not _arrival(2.0, own_rows=False)  # as much as the ranks' backward adds up


def _judged(parts: list[list[OwnRowsReinserted]], *terms: ScaledTerm, scale_matters: bool = True) -> list[str]:
    losses = [[LossDifferentiated(step, 0, terms, LINE, LINE) for step in (1, 2)] for _ in parts]
    return [finding.code for finding in judge_view(Losses(losses, parts, scale_matters=scale_matters))]


def _parts(*arrived: tuple[float, ...], factor: float = 1.0) -> list[list[OwnRowsReinserted]]:
    return [[OwnRowsReinserted(step, "all_gather", LINE, one, factor, True) for step in (1, 2)] for one in arrived]


def test_the_own_part_of_the_gradient_of_a_loss_of_all_rows_or_of_the_own_ones() -> None:
    mean = ScaledTerm("mean", 1.0, 8)
    alike, apart = _parts((1.0, 2.0), (1.0, 2.0)), _parts((1.0, 2.0), (2.0, -1.0))
    assert _judged(alike, mean) == ["DDP303"] and _judged(apart, mean) == ["DDP309"]
    assert not _judged(alike, ScaledTerm("mean", 2.0, 8, multipliers=(2.0,)))  # times the world size
    assert not _judged(alike, ScaledTerm("sum", 0.25, 8)) and not _judged(alike)
    assert not _judged(alike, mean, scale_matters=False)
    assert not _judged(_parts((1.0, 2.0), (1.0, 2.0), factor=2.0), mean)
    assert not _judged(_parts((1.0, 2.0), ()), mean) and not _judged(alike[:1], mean)


def test_the_own_part_that_is_put_back_into_what_torch_has_gathered() -> None:
    mean, total = ScaledTerm("mean", 1.0, 8), ScaledTerm("sum", 0.25, 8)

    def judged(*arrived: tuple[float, ...], besides: bool = False, **more: Any) -> list[str]:
        change: dict[str, Any] = {"by_function": False, "uses_own_rows": besides}
        parts = [[replace(part, **change) for part in of_rank] for of_rank in _parts(*arrived)]
        return _judged(parts, mean, total, **more) if besides else _judged(parts, mean, **more)

    assert judged((1.0, 2.0), (2.0, -1.0)) == judged((1.0, 2.0), (1.0, 2.0)) == ["DDP309"]
    assert not judged((1.0, 2.0), (1.0, 2.0), scale_matters=False)
    assert judged((1.0, 2.0), (1.0, 2.0), besides=True, scale_matters=False) == ["DDP309"]


@pytest.mark.parametrize("besides", [False, True])
def test_features_that_a_loss_takes_besides_what_was_gathered(besides: bool) -> None:
    torch.manual_seed(0)
    features = _features()
    loss = torch.cat([torch.randn(4, 3), features]).var(0).sum()
    loss = loss + features.square().mean() if besides else loss
    (part,) = record(loss, [_gathered(features)], [_GatheredParts(2, 1, (8, 3), "all_gather", LINE)])
    assert part.uses_own_rows == besides and part.full_gradient and not part.by_function
