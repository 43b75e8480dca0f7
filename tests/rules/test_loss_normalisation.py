"""Weights of targets: measured in loops under the real reducer, and judged."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddpcheck
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import Severity
from ddpcheck.rules.loss.ddp305_loss_normalisation import severity_of_weights
from ddpcheck.rules.loss.losses import judge_target_weights
from ddpcheck.stream.rank_report import MicroBatch
from tests.losses.table import ROWS, Convolutional, Row
from tests.reports import shown
from tests.tiers import one_of

CLASSES = 11


class Net(nn.Module):
    """Logits, or the loss too where there are targets."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens, targets=None, loss=None):
        logits = self.head(self.embedding(tokens))
        return logits if targets is None else {"loss": loss(logits, targets), "hidden": logits.detach()}


def batches(number, generator, *, equal, sizes):
    """Some micro-batches; what does not count is -100."""
    for _ in range(number):
        size = 4 if sizes is None else sizes(generator)
        tokens = torch.randint(CLASSES, (size, 6), generator=generator)
        lengths = torch.randint(1, 7, (size, 1), generator=generator)
        whole = equal or sizes is not None
        yield tokens, tokens if whole else tokens.where(torch.arange(6) < lengths, torch.tensor(-100))


def losses(divide, accumulation, total, smoothing):
    """A loss of a micro-batch that is divided by what the fault divides by."""

    def loss(logits, targets):
        reduction = "mean" if divide == "micro-batch" else "sum"
        flat = logits.flatten(0, 1), targets.flatten()
        value = F.cross_entropy(*flat, ignore_index=-100, reduction=reduction, label_smoothing=smoothing)
        return value / (accumulation if divide == "micro-batch" else total)

    return loss


def found(
    divide,
    *,
    inside=False,
    accumulation=2,
    steps=3,
    equal=False,
    sizes=None,
    every_batch=False,
    same=False,
    dtype=None,
    smoothing=0.0,
    loss_of=None,
    **options,
):
    """Codes of the findings in a loop whose loss is divided by the targets of the "step", "rank" or "micro-batch"."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0 if same else dist.get_rank())
    with ddpcheck.watch(model, on_finding=lambda _: None) as watch:
        for _ in range(steps):
            parts = list(batches(accumulation, generator, equal=equal, sizes=sizes))
            total = torch.tensor(float(sum((targets != -100).sum() for _, targets in parts)))
            if divide == "step":
                dist.all_reduce(total)
                total /= dist.get_world_size()
            loss = losses(divide, accumulation, total, smoothing) if loss_of is None else loss_of
            for index, (tokens, targets) in enumerate(parts):
                waits = index < accumulation - 1 and not every_batch
                with (
                    model.no_sync() if waits else contextlib.nullcontext(),
                    torch.autocast("cpu", dtype, enabled=dtype is not None),
                ):
                    value = model(tokens, targets, loss)["loss"] if inside else loss(model(tokens), targets)
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [finding.code for finding in watch.findings if finding.severity.value != "note"]
    ddpcheck.assert_same_on_all_ranks(["findings", *said])
    return said


ranks = pytest.mark.ddp(world_size=2, reuse="module")
WAYS = [
    {"inside": True},
    {"dtype": torch.bfloat16},
    {"inside": True, "smoothing": 0.1},
    {"find_unused_parameters": True},
]


@ranks
def test_unequal_micro_batches_and_ranks_are_found_and_a_right_loss_is_not(rank):
    for way in WAYS:
        assert found("step", **way) == [], way
        assert found("micro-batch", **way) == ["DDP514"], way
        assert found("rank", **way) == ["DDP305"], way
        assert found("micro-batch", accumulation=1, **way) == ["DDP305"], way
        assert found("micro-batch", equal=True, **way) == [], way


@ranks
def test_micro_steps_that_all_synchronise_belong_to_one_step(rank):
    assert found("step", every_batch=True, accumulation=3, steps=4) == []
    assert found("micro-batch", every_batch=True, accumulation=3, steps=4, same=True) == ["DDP514"]
    assert found("micro-batch", accumulation=1, steps=8, same=True) == []


@ranks
def test_a_smaller_last_batch_is_nothing_but_other_sizes_in_every_step_are(rank):
    sizes = iter([4, 4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 2])
    assert found("micro-batch", sizes=lambda _: next(sizes), steps=6) == []
    assert found("micro-batch", sizes=lambda generator: 4 + 3 * rank, steps=3) == ["DDP305"]


@ranks
def test_losses_that_weigh_targets_on_purpose_are_left_alone(rank):
    weights = torch.linspace(0.2, 2, CLASSES)

    def weighted(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights, ignore_index=-100)

    def by_sequence(logits, targets):
        each = F.cross_entropy(logits.mT, targets, ignore_index=-100, reduction="none")
        return (each.sum(1) / (targets != -100).sum(1)).mean()

    def one_by_one(logits, targets):
        each = [F.cross_entropy(*one, ignore_index=-100) for one in zip(logits, targets, strict=True)]
        return torch.stack(each).mean()

    def squares(logits, targets):
        return logits[targets != -100].square().mean()

    for loss in (weighted, by_sequence, one_by_one, squares):
        for inside in (True, False):
            assert found("step", loss_of=loss, inside=inside) == []


class OneByOne(Net):
    """Puts the samples through its head one by one, as detectors do, and returns the loss of each, or its logits."""

    def forward(self, tokens, targets, inside):
        heads = [self.head(row) for row in self.embedding(tokens)]
        return torch.stack(list(map(mean_of_sample, heads, targets))).mean() if inside else heads


def mean_of_sample(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=-100)


@ranks
def test_a_mean_over_samples_of_the_mean_over_the_targets_of_each_is_the_same_with_any_batch(rank):
    for inside in (True, False):
        model = nn.parallel.DistributedDataParallel(OneByOne())
        generator = torch.Generator().manual_seed(rank)
        with ddpcheck.watch(model, on_finding=lambda _: None) as watch:
            for tokens, targets in batches(6, generator, equal=False, sizes=None):
                given = model(tokens, targets, inside)
                loss = given if inside else torch.stack(list(map(mean_of_sample, given, targets))).mean()
                loss.backward()
                model.zero_grad()
        assert watch.findings == (), inside


@ranks
def test_two_forwards_in_one_loss_are_no_micro_batches(rank):
    model = nn.parallel.DistributedDataParallel(Net())
    generator = torch.Generator().manual_seed(rank)
    loss = losses("micro-batch", 1, None, 0.0)
    with ddpcheck.watch(model) as watch:
        for _ in range(3):
            parts = list(batches(2, generator, equal=False, sizes=None))
            sum(loss(model(tokens), targets) for tokens, targets in parts).backward()
            model.zero_grad()
    assert watch.findings == ()


class OwnFormula(Net):
    """Makes its loss of logits that it also returns, without a log_softmax."""

    def forward(self, tokens, targets):
        logits = super().forward(tokens)
        there = targets >= 0
        right = logits.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return {"loss": (logits.logsumexp(-1) - right)[there].sum() / there.sum(), "logits": logits.float()}


@ranks
def test_a_loss_is_followed_to_the_logits_that_it_was_made_of(rank):
    tokens = torch.randint(CLASSES, (4, 6))
    targets = tokens.where(torch.arange(6) < 2 + 3 * rank, torch.tensor(-100))
    for options, dtype in (
        ({}, torch.bfloat16),
        ({"find_unused_parameters": True}, torch.float32),
        ({"static_graph": True}, torch.float32),
    ):
        model = nn.parallel.DistributedDataParallel(OwnFormula().to(dtype), **options)
        with ddpcheck.watch(model, on_finding=lambda _: None) as watch:
            model(tokens, targets)["loss"].backward()
        assert "DDP305" in [finding.code for finding in watch.findings], (options, dtype)


@ranks
def test_it_can_be_switched_off(rank):
    model = nn.parallel.DistributedDataParallel(Net())
    tokens = torch.randint(CLASSES, (4, 6))
    targets = tokens.where(torch.arange(6) < 2 + 3 * rank, torch.tensor(-100))
    for on, codes in ((False, []), (True, ["DDP305"])):
        with ddpcheck.watch(model, check_normalisation=on, on_finding=lambda _: None) as watch:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        assert [finding.code for finding in watch.findings] == codes


@ranks
def test_a_watch_that_is_not_told_to_close_keeps_nothing_of_a_step(rank):
    model = nn.parallel.DistributedDataParallel(Net())
    ddpcheck.watch(model)
    logits = model(torch.randint(CLASSES, (4, 6)))
    storage = torch.multiprocessing.reductions.StorageWeakRef(logits.untyped_storage())
    logits.square().mean().backward()
    del logits
    assert storage.expired()


def micro_batch(counted, weight, *, index=0, position=0, rows=100.0, sequences=0):
    return MicroBatch(index, index, "output 0", position, sequences, float(counted), weight, rows)


def judged(*ranks):
    return [finding.code for finding in judge_target_weights(ranks)]


def test_the_pattern_has_to_be_proven():
    def rank(*pairs):
        return [micro_batch(n, w, position=position) for position, (n, w) in enumerate(pairs)]

    assert judged(rank((10, 1 / 10), (30, 1 / 30)), rank((20, 1 / 20), (20, 1 / 20))) == ["DDP514"]
    assert judged(rank((10, 1 / 40), (30, 1 / 40)), rank((10, 1 / 30), (20, 1 / 30))) == ["DDP305"]
    assert judged(rank((10, 1 / 40), (30, 1 / 80)), rank((30, 1 / 40), (50, 1 / 80))) == ["DDP514"]  # over ranks
    assert judged(rank((10, 0.1), (30, 0.1)), rank((20, 0.1), (20, 0.1))) == []
    assert judged(rank((10, 0.1), (30, 0.3)), rank((20, 0.2), (20, 0.4))) == []  # other weights, of another reason
    assert judged(rank((10, 0.1), (30, 0.0)), rank((20, 0.05), (20, 0.05))) == []  # a weight that is not known
    assert judged(rank((100, 1 / 100), (98, 1 / 98)), rank((100, 1 / 100), (99, 1 / 99))) == []  # hardly
    assert judged(rank((10, 0.1), (0, 0.0)), rank((10, 0.1), (10, 0.1))) == []  # nothing counts in one
    assert judged(rank((10, 0.1)), []) == []


@pytest.mark.parametrize(
    ("steps", "severity"),
    [
        ([(1.0, 1.2)], Severity.WARNING),
        ([(1.0, 2.1)], Severity.ERROR),
        ([(1.0, 1.3), (1.3, 1.0), (1.0, 1.2), (1.1, 1.0), (1.0, 1.25)], Severity.WARNING),  # now one, now the other
        ([(1.0, 1.2)] * 5, Severity.ERROR),  # always the same rank
        ([(1.0, 1.06)] * 5, Severity.WARNING),
        ([(1.0, 1.0)] * 7 + [(1.0, 4.0)], Severity.WARNING),  # the last batch of an epoch
        ([], Severity.WARNING),
    ],
)
def test_the_severity_of_a_mean_of_means_is_that_of_its_effect(steps, severity):
    assert severity_of_weights(steps) is severity


def test_a_loss_that_counts_the_first_token_of_each_sequence_is_recognised():
    first = [micro_batch(10, 1 / 14, sequences=4)]
    second = [micro_batch(20, 1 / 24, sequences=4)]
    assert judged(first, second) == ["DDP305"]


def test_what_may_be_chance_in_one_step_has_to_come_again():
    def step(index, n, w):
        return micro_batch(n, w, index=index)

    def steps(*pairs):
        return [step(index, n, w) for index, (n, w) in enumerate(pairs)]

    roughly = steps((10, 1 / 11), (12, 1 / 13), (14, 1 / 15)), steps((30, 1 / 31), (40, 1 / 41), (50, 1 / 51))
    assert judged(*(rank[:2] for rank in roughly)) == [] and judged(*roughly) == ["DDP305"]


# Everyday losses: what is normalised rightly is clean, and what is not is told by its cause, not as coupling

# `make test` has one of 32, `make test-all` one of four.
SOME = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (number % 8 > 0))
    for number, row in enumerate(one_of(4, ROWS))
]


def told(report: ddpcheck.Report) -> tuple[str, ...]:
    assert report.error is None, report.error
    return tuple(finding.code for finding in report.findings if finding.severity is not Severity.NOTE)


@pytest.mark.parametrize("row", SOME)
def test_a_loss_that_is_normalised_rightly_is_clean(row: Row) -> None:
    report = ddpcheck.check(row.right, steps=1)
    assert told(report) == row.of_the_right, shown(report)


@pytest.mark.parametrize("row", SOME)
def test_a_loss_that_is_not_is_told_by_its_cause(row: Row) -> None:
    wrong = replace(row.wrong, model=Convolutional) if row.name == "BatchNorm" else row.wrong
    report = ddpcheck.check(wrong, steps=1)
    assert told(report) == row.codes, shown(report)
