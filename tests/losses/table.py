"""The table of losses: for each a recipe that is right under DDP, and one that is wrong, with what must be said of it.

Every batch gives the two halves unequal counts (tokens, positives, boxes, weights), so that a mean of means shows.
`spread(count)` is what a right normalisation divides by: the mean over ranks of a local count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ddpcheck import Recipe

SAMPLES, TOKENS, FEATURES, CLASSES = 12, 6, 8, 5


def spread(count: Tensor) -> Tensor:
    """The mean of a local count over the ranks; the count itself in a single process."""
    if not dist.is_initialized():
        return count
    count = count.detach().clone().to(torch.get_default_dtype())
    dist.all_reduce(count)
    return count / dist.get_world_size()


def everybody(features: Tensor) -> Tensor:
    """The features of all ranks, with their gradients."""
    return torch.cat(all_gather(features)) if dist.is_initialized() else features


# Models and batches


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 4))


class Heads(nn.Module):
    """A classifier with a box for each of its answers, and what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.box = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.classes(hidden), self.box(hidden), hidden


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.decoder = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4), nn.Linear(4, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.mean(x)
        return self.decoder(mean), mean, self.spread(x).tanh()


class Convolutional(nn.Module):
    """BatchNorm couples samples as well, whatever the loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.norm: nn.Module = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())


class GroupNormed(Convolutional):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)


def samples(step: int) -> dict[str, Tensor]:
    """Samples with labels, positives (more of them in the first half) and boxes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    first = torch.arange(SAMPLES) < SAMPLES // 2
    positive = torch.arange(SAMPLES) % 6 < torch.where(first, 5, 2)
    return {
        "x": x,
        "label": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        "positive": positive,
        "box": torch.randn(SAMPLES, 4, generator=generator),
        "attributes": (torch.rand(SAMPLES, CLASSES, generator=generator) < 0.4).float(),
    }


def sentences(step: int) -> dict[str, Tensor]:
    """Tokens and labels, of which the first half has more that count."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.where(torch.arange(SAMPLES) < SAMPLES // 2, 6, 2) - torch.arange(SAMPLES) % 2
    real = torch.arange(TOKENS)[None] < lengths[:, None]
    labels = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=generator)
    tokens = torch.randint(0, 20, (SAMPLES, TOKENS), generator=generator)
    return {"tokens": tokens, "labels": labels.masked_fill(~real, -100)}


# Losses, with the count that they divide by as an argument: `spread` is right, `alone` is wrong


def alone(count: Tensor) -> Tensor:
    """A local count, as it is: wrong where the ranks' counts differ."""
    return count


Count = Callable[[Tensor], Tensor]
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Any]


def loss_of(function: Callable[..., Any]) -> Callable[..., Loss]:
    """Return a function that makes a loss of a model and a batch, from the arguments behind them."""

    def with_arguments(*arguments: Any, **options: Any) -> Loss:
        def loss(model: nn.Module, batch: Batch) -> Any:
            return function(model, batch, *arguments, **options)

        return loss

    return with_arguments


@loss_of
def token_cross_entropy(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    total = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return total / count((batch["labels"] != -100).sum())


@loss_of
def class_weights(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    weights = torch.tensor([1.0, 8.0, 0.3, 2.0, 0.5], dtype=batch["x"].dtype)
    total = F.cross_entropy(model(batch["x"]), batch["label"], weight=weights, reduction="sum")
    return total / count(weights[batch["label"]].sum())


@loss_of
def boxes(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    box = model(batch["x"])
    chosen = batch["positive"]
    return F.smooth_l1_loss(box[chosen], batch["box"][chosen], reduction="sum") / count(chosen.sum())


@loss_of
def detection(model: nn.Module, batch: Batch, count: Count, *, apart: bool = False) -> Any:
    classes, box, _ = model(batch["x"])
    chosen = batch["positive"]
    positives = count(chosen.sum())
    plain = F.binary_cross_entropy_with_logits(classes, batch["attributes"].to(classes.dtype), reduction="none")
    found = {
        "class": plain.sum() / positives,
        "box": F.l1_loss(box[chosen], batch["box"][chosen], reduction="sum") / positives,
        "spread": 0.1 * box.square().mean(),
    }
    return found if apart else sum(found.values())


@loss_of
def sample_by_sample(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    """A Python loop over the samples of the batch."""
    classes, box, _ = model(batch["x"])
    total, positives = classes.new_zeros(()), count(batch["positive"].sum())
    for one, label, seen, real, chosen in zip(
        classes, batch["label"], box, batch["box"], batch["positive"], strict=True
    ):
        total = total + F.cross_entropy(one[None], label[None]) / len(classes)
        if chosen:
            total = total + (seen - real).abs().sum() / positives
    return total


# Sums against means


@loss_of
def evidence_bound(model: nn.Module, batch: Batch, count: Count, *, apart: bool = False) -> Any:
    """Reconstruction as a mean over samples; the divergence as a mean over samples or as a sum."""
    decoded, mean, spread_of = model(batch["x"])
    error = (decoded - batch["x"]).square().sum(1).mean()
    divergence = -0.5 * (1 + spread_of - mean.square() - spread_of.exp()).sum() / count(mean[:, 0])
    return {"error": error, "divergence": divergence} if apart else error + 0.5 * divergence


def of_samples(tensor: Tensor) -> Tensor:
    """The number of samples: right, for the shards are equal."""
    return torch.tensor(float(len(tensor)))


def nothing(_tensor: Tensor) -> Tensor:
    """A sum: wrong."""
    return torch.ones(())


@loss_of
def summed(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    total = F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")
    return total / count(batch["x"])


# A factor of the world size


@loss_of
def by_the_world(model: nn.Module, batch: Batch, right: bool) -> Tensor:
    """Tokens divided by the count of all ranks; wrong without the world size that DDP divides by."""
    total = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    count = spread((batch["labels"] != -100).sum())
    world = dist.get_world_size() if dist.is_initialized() and not right else 1
    return total / count / world


@loss_of
def one_term_by_the_world(model: nn.Module, batch: Batch, right: bool) -> Tensor:
    classes, box, _ = model(batch["x"])
    world = dist.get_world_size() if dist.is_initialized() and not right else 1
    chosen = batch["positive"].to(box.dtype)
    of_box = ((box - batch["box"]).abs().sum(1) * chosen).sum() / spread(chosen.sum()) / world
    return F.cross_entropy(classes, batch["label"]) + of_box


# Samples that are compared with each other


@loss_of
def contrastive(model: nn.Module, batch: Batch, gather: Callable[[Tensor], Tensor]) -> Tensor:
    one = F.normalize(model(batch["x"]), dim=1)
    two = F.normalize(model(batch["x"] + 0.1), dim=1)
    start = dist.get_rank() * len(one) if gather is everybody and dist.is_initialized() else 0
    return F.cross_entropy(one @ gather(two).T / 0.2, torch.arange(len(one)) + start)


def dice(model: nn.Module, batch: Batch) -> Tensor:
    seen, there = model(batch["x"]).sigmoid(), batch["attributes"]
    return 1 - (2 * (seen * there).sum(0) / (seen.sum(0) + there.sum(0))).mean()


def dice_by_sample(model: nn.Module, batch: Batch) -> Tensor:
    seen, there = model(batch["x"]).sigmoid(), batch["attributes"]
    return (1 - 2 * (seen * there).sum(1) / (seen.sum(1) + there.sum(1))).mean()


def itself(tensor: Tensor) -> Tensor:
    return tensor


@loss_of
def class_frequencies(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    """Each class weighs as much as it is rare in the batch: the counts of all ranks, or of the local batch."""
    logits = model(batch["x"])
    frequencies = count(torch.bincount(batch["label"], minlength=CLASSES)).clamp_min(0.5).to(logits.dtype)
    each = F.cross_entropy(logits, batch["label"], reduction="none") / frequencies[batch["label"]]
    return each.sum() / CLASSES


def plain_classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


@loss_of
def positives_of_classes(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    each = F.cross_entropy(model(batch["x"]), batch["label"], reduction="none") * batch["positive"]
    return each.sum() / count(batch["positive"].sum())


@dataclass(frozen=True)
class Row:
    """One loss.

    Attributes:
        name: What it is.
        right: Normalised so that DDP gives the gradient of the global batch.
        wrong: Not so.
        codes: What must be said of it, errors and warnings, in the order of the report.
        of_the_right: What is said of the right one for another reason (BatchNorm).
    """

    name: str
    right: Recipe
    wrong: Recipe
    codes: tuple[str, ...] = ("DDP305",)
    of_the_right: tuple[str, ...] = ()


def _row(name: str, model: Any, batch: Any, losses: Any, *codes: str, **more: Any) -> Row:
    return Row(name, *(Recipe(model=model, batch=batch, loss=loss) for loss in losses), codes or ("DDP305",), **more)


def _counted(loss: Any, **more: Any) -> Any:
    return loss(spread, **more), loss(alone, **more)


def _summed(loss: Any, **more: Any) -> Any:
    return loss(of_samples, **more), loss(nothing, **more)


ROWS = (  # each fourth one is in `make test-all`
    _row("cross entropy per token", tagger, sentences, _counted(token_cross_entropy)),
    _row("cross entropy with class weights", classifier, samples, _counted(class_weights)),
    _row("boxes of positives", encoder, samples, _counted(boxes)),
    _row("detection: classes, boxes, a penalty", Heads, samples, _counted(detection)),
    _row("one of two terms by the world", Heads, samples, map(one_term_by_the_world, (True, False)), "DDP303"),
    _row("detection, in a dict", Heads, samples, _counted(detection, apart=True)),
    _row("a loop over samples", Heads, samples, _counted(sample_by_sample)),
    _row("cross entropy, summed", classifier, samples, _summed(summed)),
    _row("evidence lower bound, in a dict", Autoencoder, samples, _summed(evidence_bound, apart=True)),
    _row("evidence lower bound", Autoencoder, samples, _summed(evidence_bound)),
    _row("tokens by the count of all ranks", tagger, sentences, map(by_the_world, (True, False)), "DDP303"),
    _row("classes by frequency", classifier, samples, _counted(class_frequencies), "DDP304"),
    _row(
        *("BatchNorm and a mean of positives", Convolutional, samples, _counted(positives_of_classes)),
        *("DDP305", "DDP304"),
        of_the_right=("DDP304",),
    ),
    _row("BatchNorm", GroupNormed, samples, (plain_classes, plain_classes), "DDP304"),
    _row("contrastive, local negatives", encoder, samples, map(contrastive, (everybody, itself)), "DDP304"),
    _row("dice of the batch", classifier, samples, (dice_by_sample, dice), "DDP304"),
)
