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
        counts = torch.arange(6) < torch.randint(1, 7, (size, 1), generator=generator)
        yield tokens, tokens if equal or sizes is not None else tokens.where(counts, torch.tensor(-100))


def losses(divide, accumulation, total, smoothing):
    """A loss of a micro-batch that is divided by what the fault divides by."""

    def loss(logits, targets):
        reduction = "mean" if divide == "micro-batch" else "sum"
        flat = logits.flatten(0, 1), targets.flatten()
        value = F.cross_entropy(*flat, ignore_index=-100, reduction=reduction, label_smoothing=smoothing)
        return value / (accumulation if divide == "micro-batch" else total)

    return loss


def codes_found(divide, *, inside=False, accumulation=2, steps=3, every_batch=False, same=False, **more):
    """Codes of the findings in a loop whose loss is divided by the targets of the "step", "rank" or "micro-batch"."""
    kind = {name: more.pop(name, None) for name in ("equal", "sizes")}
    dtype, smoothing, loss_of = more.pop("dtype", None), more.pop("smoothing", 0.0), more.pop("loss_of", None)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0 if same else dist.get_rank())
    with ddpcheck.watch(model, on_finding=lambda _: None) as watch:
        for _ in range(steps):
            parts = list(batches(accumulation, generator, **kind))
            total = torch.tensor(float(sum((targets != -100).sum() for _, targets in parts)))
            if divide == "step":
                dist.all_reduce(total)
                total /= dist.get_world_size()
            loss = loss_of or losses(divide, accumulation, total, smoothing)
            for index, (tokens, targets) in enumerate(parts):
                waits = index < accumulation - 1 and not every_batch
                autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
                with model.no_sync() if waits else contextlib.nullcontext(), autocast:
                    value = model(tokens, targets, loss)["loss"] if inside else loss(model(tokens), targets)
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
    codes = [finding.code for finding in watch.findings if finding.severity.value != "note"]
    ddpcheck.assert_same_on_all_ranks(["findings", *codes])
    return codes


ranks = pytest.mark.ddp(world_size=2, reuse="module")
WAYS = [{"inside": True}, {"dtype": torch.bfloat16}, {"find_unused_parameters": True, "inside": True, "smoothing": 0.1}]


@ranks
def test_unequal_micro_batches_and_ranks_are_found_and_a_right_loss_is_not(rank):
    for way in WAYS:
        assert codes_found("step", **way) == [], way
        assert codes_found("micro-batch", **way) == ["DDP514"], way
        assert codes_found("rank", **way) == ["DDP305"], way
        assert codes_found("micro-batch", accumulation=1, **way) == ["DDP305"], way
        assert codes_found("micro-batch", equal=True, **way) == [], way


@ranks
def test_micro_steps_that_all_synchronise_belong_to_one_step(rank):
    assert codes_found("step", every_batch=True, accumulation=3, steps=4) == []
    assert codes_found("micro-batch", every_batch=True, accumulation=3, steps=4, same=True) == ["DDP514"]
    assert codes_found("micro-batch", accumulation=1, steps=8, same=True) == []


@ranks
def test_a_smaller_last_batch_is_nothing_but_other_sizes_in_every_step_are(rank):
    sizes = iter([4, 4, 4, 4, 4, 2, 4, 4, 4, 4, 4, 2])
    assert codes_found("micro-batch", sizes=lambda _: next(sizes), steps=6) == []
    assert codes_found("micro-batch", sizes=lambda generator: 4 + 3 * rank, steps=3) == ["DDP305"]


@ranks
def test_losses_that_weigh_targets_on_purpose_are_left_alone(rank):
    weights = torch.linspace(0.2, 2, CLASSES)

    def weighted(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights, ignore_index=-100)

    def by_sequence(logits, targets):
        each = F.cross_entropy(logits.mT, targets, ignore_index=-100, reduction="none")
        return (each.sum(1) / (targets != -100).sum(1)).mean()

    def by_sample(logits, targets):
        pairs = zip(logits, targets, strict=True)
        return torch.stack([F.cross_entropy(*pair, ignore_index=-100) for pair in pairs]).mean()

    def squares(logits, targets):
        return logits[targets != -100].square().mean()

    for loss in (weighted, by_sequence, by_sample, squares):
        for inside in (True, False):
            assert codes_found("step", loss_of=loss, inside=inside) == []


@ranks
def test_two_forwards_in_one_loss_are_no_micro_batches(rank):
    model = nn.parallel.DistributedDataParallel(Net())
    loss = losses("micro-batch", 1, None, 0.0)
    with ddpcheck.watch(model) as watch:
        for _ in range(3):
            parts = batches(2, torch.Generator().manual_seed(rank), equal=False, sizes=None)
            sum(loss(model(tokens), targets) for tokens, targets in parts).backward()
    assert watch.findings == ()


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


def test_the_severity_of_a_mean_of_means_is_that_of_its_effect():
    in_turn = [(1.0, 1.3), (1.3, 1.0), (1.0, 1.2), (1.1, 1.0), (1.0, 1.25)]  # now one rank, now the other
    last_batch = [(1.0, 1.0)] * 7 + [(1.0, 4.0)]
    for steps in ([(1.0, 1.2)], in_turn, [(1.0, 1.06)] * 5, last_batch, []):
        assert severity_of_weights(steps) is Severity.WARNING
    for steps in ([(1.0, 2.1)], [(1.0, 1.2)] * 5):  # always the same rank
        assert severity_of_weights(steps) is Severity.ERROR


def test_what_may_be_chance_in_one_step_has_to_come_again():
    def steps(*targets, more=1):
        return [micro_batch(n, 1 / (n + more), index=index) for index, n in enumerate(targets)]

    roughly = steps(10, 12, 14), steps(30, 40, 50)
    assert judged(*(rank[:2] for rank in roughly)) == [] and judged(*roughly) == ["DDP305"]
    first, second = ([micro_batch(n, 1 / (n + 4), sequences=4)] for n in (10, 20))
    assert judged(first, second) == ["DDP305"]  # which also counts the first token of each sequence


# Everyday losses: what is normalised rightly is clean, and what is not is told by its cause, not as coupling

# `make test` has one of 32, `make test-all` one of four.
SOME = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (number % 8 > 0))
    for number, row in enumerate(one_of(2, ROWS))
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
