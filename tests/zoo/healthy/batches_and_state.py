"""Inputs and outputs of forward and loss, in every form that a user has for it.

And counters, buffers, attributes and random numbers that change from step to step, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ddpcheck import Recipe


def rows(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def layers(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))


def squares(output: Tensor, x: Tensor) -> Tensor:
    return (output[:, 0] - x.sum(1)).square()


def to_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model(batch), batch).mean()


def recipe(model: Callable[[], nn.Module] = layers, batch: Callable[[int], Any] = rows, **options: Any) -> Recipe:
    return Recipe(**{"model": model, "batch": batch, "loss": to_sum, **options})


# Batches


@dataclass(frozen=True)
class DataBatch:
    features: Tensor
    target: Tensor
    scale: float = 2.0
    name: str = "training"
    weights: Tensor | None = None


def loss_of_dataclass(model: nn.Module, batch: DataBatch) -> Tensor:
    assert isinstance(batch, DataBatch)
    return batch.scale * (model(batch.features)[:, 0] - batch.target).square().mean()


# A batch that is a frozen dataclass, with things in it that are no tensors.
dataclass_batch = recipe(batch=lambda step: DataBatch(rows(step), rows(step).sum(1)), loss=loss_of_dataclass)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        x -= 3.0
        x.div_(x.abs().amax(1, keepdim=True))
        return self.layers(x)[:, 0]


def popping_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    y = batch.pop("y")
    return F.mse_loss(model(**batch), y)


# Forward normalises its input in place, and the loss takes the batch apart: each run must get a batch of its own.
batch_written_into = recipe(InPlace, lambda step: {"x": rows(step), "y": rows(step).sum(1)}, loss=popping_loss)


# Shards

# A recipe with its own sharding: samples are dealt out one by one, as `DistributedSampler` does.
own_shard = recipe(shard=lambda batch, rank, world_size: batch[rank::world_size])


def mean_over_ranks(model: nn.Module, batch: Tensor) -> Tensor:
    """The sum of errors, divided by the average count of a rank."""
    errors = squares(model(batch), batch)
    count = torch.tensor(float(len(errors)), device=errors.device)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count)  # no gradient goes through a count
        count /= dist.get_world_size()
    return errors.sum() / count


def empty_on_the_last_rank(batch: Tensor, rank: int, world_size: int) -> Tensor:
    parts = batch.tensor_split(world_size - 1 if batch[0, 0] > 0 and world_size > 1 else world_size)
    return parts[rank] if rank < len(parts) else batch[:0]


# In one step the last rank has no samples, and the loss knows what to do.
empty_shard_handled = recipe(shard=empty_on_the_last_rank, loss=mean_over_ranks)


# Outputs


class PackedGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x: Tensor, n: Tensor) -> PackedSequence:
        return self.gru(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[0]


def padded(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(12, 6, 4, generator=generator), "n": torch.randint(1, 7, (12,), generator=generator)}


def loss_of_packed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    y, _ = pad_packed_sequence(model(**batch), batch_first=True, total_length=6)
    return y.square().mean()


# forward returns a PackedSequence, a named tuple with a constructor of its own.
packed_sequence_out = recipe(PackedGRU, padded, loss=loss_of_packed)


# Losses


class AutoEncoder(nn.Module):
    """Its code has noise from torch's generator, not from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def variational_loss(model: nn.Module, batch: Tensor) -> Tensor:
    decoded, mean, log_variance = model(batch)
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
    return ((decoded - batch).square().sum(1) + divergence).mean()


vae = recipe(AutoEncoder, loss=variational_loss)


def logged_loss(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    accuracy = (model(batch) > 0).float().mean().detach()
    return {"loss": to_sum(model, batch), "acc": accuracy, "auc": torch.tensor(float("nan")), "lr": 0.1}


# A detached metric that is not a number stands beside the loss.
loss_dict_logging = recipe(loss=logged_loss)


def siamese_loss(model: nn.Module, batch: Tensor) -> Tensor:
    same = (batch[:, 0] > 0) * 2 - 1
    return F.cosine_embedding_loss(model(batch), model(batch.roll(1, 1)), same, margin=-0.5)


# A siamese network: the wrapper is called twice before one backward.
two_forwards_one_backward = recipe(lambda: layers(4), loss=siamese_loss)


def penalised_slope(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return squares(output, batch).mean() + (slope.norm(dim=1) - 1).square().mean()


# A penalty on the gradient with respect to the input: `autograd.grad` inside the loss, and a double backward.
gradient_penalty = recipe(loss=penalised_slope)


def perturbed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    delta = nn.Parameter(torch.zeros_like(batch) + 0.01)
    return squares(model(batch + delta), batch).mean()


# The loss makes a fresh nn.Parameter as an adversarial perturbation in every step.
fgsm_pgd_param = recipe(loss=perturbed_loss)


def penalised_weights(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    return to_sum(model, batch) + 0.01 * sum(parameter.square().sum() for parameter in inner[0].parameters())


# A weight penalty in the loss reads parameters outside forward; DDP gets it right without find_unused_parameters.
weight_used_outside_forward = recipe(loss=penalised_weights)


# What changes from step to step


class Net(nn.Module):
    """Base class of the modules below."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


# Counters


class MadeLate(Net):
    """A counter that the first forward pass makes, with dropout: each run of a step counts from the start."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        hidden = F.dropout(torch.tanh(self.body(x)), 0.5, self.training)
        return self.head(hidden) * min(1.0, self.calls / 10)


counter_made_in_forward = recipe(MadeLate)
STEP = 0


def annealed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    global STEP
    STEP += 1
    return to_sum(model, batch) * STEP / 10


# A counter among the globals anneals the loss.
global_step_counter = recipe(loss=annealed_loss)


class Criterion:
    """No module; keeps a moving average, in a tensor, of numbers that all ranks share."""

    calls = 0

    def __init__(self) -> None:
        self.average = torch.ones(())
        self.history: dict[str, list[float]] = {"weights": []}

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        Criterion.calls += 1
        self.average.mul_(0.9).add_(0.1 * Criterion.calls)
        self.history["weights"].append(float(self.average))
        return to_sum(model, batch) / self.average


criterion_object_with_average = recipe(loss=Criterion())


def make_loss() -> Callable[[nn.Module, Tensor], Tensor]:
    generator, seen = torch.Generator().manual_seed(5), list[int]()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(len(seen))
        weight = 0.5 + torch.rand((), generator=generator).item() + 0.1 * len(seen)
        return weight * to_sum(model, batch)

    return loss


# A generator that lives in the closure of the loss gives the weight of a term; a counter lives there too.
generator_in_a_closure = recipe(loss=make_loss())


# Buffers


class Attention(nn.Module):
    """A causal mask of minus infinities in a buffer, beside a boolean and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(8, 24, bias=False), nn.Linear(8, 1)
        self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))
        self.register_buffer("keep", torch.ones(6, dtype=torch.bool))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        weights = (query @ key.transpose(1, 2) + self.mask).softmax(-1)
        return self.head((weights @ value)[:, self.keep].mean(1))


class Positional(nn.Module):
    """A table of sines that is kept in a buffer outside the state dict, and grows when it is asked for more."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.register_buffer("table", torch.empty(0, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            positions = torch.arange(float(x.shape[1]), device=x.device)[:, None]
            self.table = torch.sin(positions / 10 ** (torch.arange(8.0, device=x.device) / 8))
        return self.head(x + self.table[: x.shape[1]].to(x.dtype)).mean(1)


def sequences(step: int, length: int = 6) -> Tensor:
    return torch.randn(12, length, 8, generator=torch.Generator().manual_seed(step))


def to_whole_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()


buffers_constant = recipe(Attention, sequences, loss=to_whole_sum)
positional_cache = recipe(Positional, lambda step: sequences(step, 4 + step), loss=to_whole_sum)


class Quantiser(nn.Module):
    """A vector quantiser whose loss begins with a zero that forward makes require grad, and that nobody trains.

    The zero is a buffer, as in vector-quantize-pytorch, and a new tensor in each forward, which the module keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(12, 8)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        commitment = self.zero
        if self.training:
            commitment.requires_grad_()
        self.last = torch.zeros((), requires_grad=True)
        codes = self.codes(torch.cdist(x.detach(), self.codes.weight.detach()).argmin(1))
        commitment = commitment + self.last + F.mse_loss(x, codes.detach()) + F.mse_loss(codes, x.detach())
        return x + (codes - x).detach(), commitment


class QuantisedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.quantiser, self.decoder = nn.Linear(8, 8), Quantiser(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        codes, commitment = self.quantiser(self.encoder(x))
        return F.mse_loss(self.decoder(codes), x) + commitment


vector_quantiser = recipe(QuantisedAutoencoder, loss=lambda model, batch: model(batch))


# Attributes that a copy, a comparison or a report may stumble over


class NestedTensor(Net):
    """An attribute is a nested tensor, which has no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Config:
    __slots__ = ("a",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("frozen config")


class Raising(Net):
    """Attributes of a helper object raise when they are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    @property
    def weight_norm(self) -> Any:
        raise RuntimeError("boom")


class OwnNames(Net):
    """named_parameters is overridden without remove_duplicate."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[Any]:  # type: ignore[override]
        yield from super().named_parameters(prefix, recurse)


class KnowsItsRank(Net):
    """Knows its rank and names its log after it, and computes the same as every other."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.log, self.folders = f"rank{self.rank}.log", {"cache": f"/tmp/cache-{self.rank}"}


nested_attr = recipe(NestedTensor)
prop_raises = recipe(Raising)
named_params_override = recipe(OwnNames)
rank_aware_program = recipe(KnowsItsRank)
# Random numbers


class Projected(Net):
    """A random projection is drawn in forward from a generator that is seeded alike everywhere; dropout is not."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            projection = torch.randn(8, 8)
        return self.head((F.dropout(self.body(x), 0.2, self.training) @ projection.to(x)).tanh())


shared_seed_outside_dropout = recipe(Projected)


def rejecting_loss(model: nn.Module, batch: Tensor) -> Tensor:
    noise = torch.randn(8)
    while noise.norm() >= 1.2:
        noise = torch.randn(8)
    return to_sum(model, batch + 0.01 * noise)


def views_loss(model: nn.Module, batch: Tensor) -> Tensor:
    probe = batch.clone().requires_grad_()
    inner = getattr(model, "module", model)
    squares(inner(probe), probe).sum().backward()
    nearby = (batch + 0.01 * probe.grad.sign()).detach()
    inner.zero_grad()
    left, right = model(torch.cat([batch, nearby])).chunk(2)
    return (left - right).square().mean() + squares(left, batch).mean()


# Two views in one batch, and a backward pass of the loss's own for the input.
advantages_and_views = recipe(loss=views_loss)


# Noise is drawn until it is small enough: with the numbers silenced this would go on for ever.
rejection_sampling = recipe(loss=rejecting_loss)
