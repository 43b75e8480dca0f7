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
    """Samples with labels, positives (more of them in the first half), weights and boxes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    first = torch.arange(SAMPLES) < SAMPLES // 2
    positive = torch.arange(SAMPLES) % 6 < torch.where(first, 5, 2)
    return {
        "x": x,
        "label": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        "positive": positive,
        "weight": 0.2 + torch.rand(SAMPLES, generator=generator) + first.float(),
        "box": torch.randn(SAMPLES, 4, generator=generator),
        "attributes": (torch.rand(SAMPLES, CLASSES, generator=generator) < 0.4).float(),
    }


def sentences(step: int) -> dict[str, Tensor]:
    """Tokens and labels, of which the first half has more that count."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.where(torch.arange(SAMPLES) < SAMPLES // 2, 6, 2) - torch.arange(SAMPLES) % 2
    real = torch.arange(TOKENS)[None] < lengths[:, None]
    labels = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=generator)
    return {
        "tokens": torch.randint(0, 20, (SAMPLES, TOKENS), generator=generator),
        "labels": labels.masked_fill(~real, -100),
        "mask": real.float(),
        "length": lengths,
    }


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
def masked_error(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    error = (model(batch["tokens"]) - 1).square().mean(-1)
    return (error * batch["mask"]).sum() / count(batch["mask"].sum())


@loss_of
def weighted_error(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    error = (model(batch["x"]) - batch["attributes"]).square().sum(1)
    return (error * batch["weight"]).sum() / count(batch["weight"].sum())


CLASS_WEIGHTS = torch.tensor([1.0, 8.0, 0.3, 2.0, 0.5])


@loss_of
def class_weights(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    weights = CLASS_WEIGHTS.to(batch["x"].dtype)
    total = F.cross_entropy(model(batch["x"]), batch["label"], weight=weights, reduction="sum")
    return total / count(weights[batch["label"]].sum())


@loss_of
def focal(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    logits = model(batch["x"])
    plain = F.binary_cross_entropy_with_logits(logits, batch["attributes"].to(logits.dtype), reduction="none")
    weight = (1 - (-plain).exp()).square()
    return (weight * plain).sum() / count(batch["attributes"].sum())


@loss_of
def boxes(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    box = model(batch["x"])
    chosen = batch["positive"]
    return F.smooth_l1_loss(box[chosen], batch["box"][chosen], reduction="sum") / count(chosen.sum())


@loss_of
def ctc(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    log_probs = model(batch["tokens"]).log_softmax(-1).transpose(0, 1)
    size = len(batch["tokens"])
    targets, lengths = torch.ones(size, 2, dtype=torch.long), torch.full((size,), TOKENS)
    target_lengths = 1 + (batch["length"] > 3).long()
    total = F.ctc_loss(log_probs, targets, lengths, target_lengths, reduction="sum", zero_infinity=True)
    return total / count(target_lengths.sum())


@loss_of
def tokens_and_positives(model: nn.Module, batch: Batch, count: Count, *, apart: bool = False) -> Any:
    logits = model(batch["tokens"])
    real, later = batch["mask"], batch["mask"] * (torch.arange(TOKENS) > 0)
    tokens = (logits.square().mean(-1) * real).sum() / count(real.sum())
    positives = (logits.logsumexp(-1) * later).sum() / count(later.sum())
    return {"tokens": tokens, "positives": positives} if apart else tokens + 0.5 * positives


@loss_of
def class_weights_and_error(model: nn.Module, batch: Batch, count: Count, *, apart: bool = False) -> Any:
    classes, box, _ = model(batch["x"])
    weights = CLASS_WEIGHTS.to(classes.dtype)
    of_class = F.cross_entropy(classes, batch["label"], weight=weights, reduction="sum")
    of_class = of_class / count(weights[batch["label"]].sum())
    of_box = F.mse_loss(box, batch["box"])
    return {"class": of_class, "box": of_box} if apart else of_class + of_box


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
def elementwise_sum(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    """Two terms that are added before they are summed."""
    classes, box, _ = model(batch["x"])
    one = F.cross_entropy(classes, batch["label"], reduction="none") * batch["weight"]
    two = (box - batch["box"]).square().sum(1) * batch["positive"]
    return (one / count(batch["weight"].sum()) + two / count(batch["positive"].sum())).sum()


@loss_of
def weights_that_add_up_to_one(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    share = batch["weight"] / count(batch["weight"].sum())
    return (F.cross_entropy(model(batch["x"]), batch["label"], reduction="none") * share).sum()


@loss_of
def uncertainty_weighted(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    classes, box, hidden = model(batch["x"])
    scale = hidden.new_tensor(0.3)
    chosen = batch["positive"].to(box.dtype)
    of_box = ((box - batch["box"]).abs().sum(1) * chosen).sum() / count(chosen.sum())
    return (-scale).exp() * of_box + torch.stack([F.cross_entropy(classes, batch["label"]), 0.1 * of_box]).mean()


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


@loss_of
def activation_penalty(model: nn.Module, batch: Batch, count: Count, *, apart: bool = False) -> Any:
    classes, box, hidden = model(batch["x"])
    of_class, penalty = (
        F.cross_entropy(classes, batch["label"]) + F.mse_loss(box, batch["box"]),
        hidden.square().sum() / count(hidden),
    )
    return {"class": of_class, "penalty": 0.1 * penalty} if apart else of_class + 0.1 * penalty


@loss_of
def distillation(model: nn.Module, batch: Batch, count: Count, *, apart: bool = False) -> Any:
    logits = model(batch["x"])
    teacher = (batch["x"][:, :CLASSES] * 2).softmax(1)
    match = F.kl_div(logits.log_softmax(1), teacher, reduction="sum") / count(logits)
    label = F.cross_entropy(logits, batch["label"])
    return {"label": label, "match": match} if apart else 0.7 * label + 0.3 * match


@loss_of
def poisson(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    rate = model(batch["x"])
    return F.poisson_nll_loss(rate, batch["attributes"].to(rate.dtype), reduction="sum") / count(rate)


@loss_of
def policy(model: nn.Module, batch: Batch, count: Count) -> Tensor:
    chosen = model(batch["x"]).log_softmax(1).gather(1, batch["label"][:, None])[:, 0]
    entropy = -(model(batch["x"]).softmax(1) * model(batch["x"]).log_softmax(1)).sum(1)
    return -(chosen * batch["weight"]).mean() - 0.1 * entropy.sum() / count(chosen)


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


@loss_of
def dice(model: nn.Module, batch: Batch, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    seen, there = model(batch["x"]).sigmoid(), batch["attributes"]
    both, either = reduce((seen * there).sum(0)), reduce(seen.sum(0) + there.sum(0))
    return 1 - (2 * both / either).mean()


def dice_by_sample(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    seen, there = model(batch["x"]).sigmoid(), batch["attributes"]
    return (1 - 2 * (seen * there).sum(1) / (seen.sum(1) + there.sum(1))).mean()


def root_of_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["attributes"]).square().mean().sqrt()


def root_by_sample(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["attributes"]).square().mean(1).sqrt().mean()


@loss_of
def contrastive_and_classes(model: nn.Module, batch: Batch, gather: Callable[[Tensor], Tensor]) -> Tensor:
    classes, box, _ = model(batch["x"])
    one = F.normalize(box, dim=1)
    start = dist.get_rank() * len(one) if gather is everybody and dist.is_initialized() else 0
    match = F.cross_entropy(one @ gather(one).T / 0.2, (torch.arange(len(one)) + start))
    return F.cross_entropy(classes, batch["label"]) + 0.1 * match


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


def _row(name: str, model: Any, batch: Any, right: Any, wrong: Any, *codes: str, **more: Any) -> Row:
    made = [Recipe(model=model, batch=batch, loss=loss) for loss in (right, wrong)]
    return Row(name, *made, codes=codes or ("DDP305",), **more)


def _counted(name: str, model: Any, batch: Any, loss: Any, **more: Any) -> Row:
    return _row(name, model, batch, loss(spread, **more), loss(alone, **more))


def _sum(name: str, model: Any, batch: Any, loss: Any, **more: Any) -> Row:
    return _row(name, model, batch, loss(of_samples, **more), loss(nothing, **more))


ROWS = (
    _counted("cross entropy per token", tagger, sentences, token_cross_entropy),
    _counted("masked squared error", tagger, sentences, masked_error),
    _counted("error weighted by sample", classifier, samples, weighted_error),
    _counted("cross entropy with class weights", classifier, samples, class_weights),
    _counted("focal loss by positives", classifier, samples, focal),
    _counted("boxes of positives", encoder, samples, boxes),
    _counted("CTC by target length", tagger, sentences, ctc),
    _counted("tokens plus positives", tagger, sentences, tokens_and_positives),
    _counted("tokens and positives, in a dict", tagger, sentences, tokens_and_positives, apart=True),
    _counted("class weights plus squared error", Heads, samples, class_weights_and_error),
    _counted("class weights and squared error, in a dict", Heads, samples, class_weights_and_error, apart=True),
    _counted("detection: classes, boxes, a penalty", Heads, samples, detection),
    _counted("detection, in a dict", Heads, samples, detection, apart=True),
    _counted("terms added before they are summed", Heads, samples, elementwise_sum),
    _counted("weights that add up to one", classifier, samples, weights_that_add_up_to_one),
    _counted("terms weighted by their uncertainty", Heads, samples, uncertainty_weighted),
    _row("classes by frequency", classifier, samples, *map(class_frequencies, (spread, alone)), "DDP304"),
    _counted("a loop over samples", Heads, samples, sample_by_sample),
    _sum("cross entropy, summed", classifier, samples, summed),
    _sum("evidence lower bound", Autoencoder, samples, evidence_bound),
    _sum("evidence lower bound, in a dict", Autoencoder, samples, evidence_bound, apart=True),
    _sum("penalty on activations", Heads, samples, activation_penalty),
    _sum("penalty on activations, in a dict", Heads, samples, activation_penalty, apart=True),
    _sum("distillation", classifier, samples, distillation),
    _sum("distillation, in a dict", classifier, samples, distillation, apart=True),
    _sum("Poisson likelihood", classifier, samples, poisson),
    _sum("policy gradient with entropy", classifier, samples, policy),
    _row("tokens by the count of all ranks", tagger, sentences, by_the_world(True), by_the_world(False), "DDP303"),
    _row("one of two terms by the world", Heads, samples, *map(one_term_by_the_world, (True, False)), "DDP303"),
    _row("contrastive, local negatives", encoder, samples, contrastive(everybody), contrastive(itself), "DDP304"),
    _row("dice of the batch", classifier, samples, dice_by_sample, dice(itself), "DDP304"),
    _row("root of the mean", classifier, samples, root_by_sample, root_of_mean, "DDP304"),
    _row("contrastive plus classes", Heads, samples, *map(contrastive_and_classes, (everybody, itself)), "DDP304"),
    _row("BatchNorm", GroupNormed, samples, plain_classes, plain_classes, "DDP304"),
    _row(
        "BatchNorm and a mean of positives",
        Convolutional,
        samples,
        positives_of_classes(spread),
        positives_of_classes(alone),
        "DDP305",
        "DDP304",
        of_the_right=("DDP304",),
    ),
)
