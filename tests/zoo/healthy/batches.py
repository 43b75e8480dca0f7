"""What goes into forward and loss and what comes out of them, in every form that a user has for it: nothing to find."""

from __future__ import annotations

from collections.abc import Callable
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


def sequences(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(12, 6, 4, generator=generator), "n": torch.randint(1, 7, (12,), generator=generator)}


def loss_of_packed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    y, _ = pad_packed_sequence(model(**batch), batch_first=True, total_length=6)
    return y.square().mean()


# forward returns a PackedSequence, a named tuple with a constructor of its own.
packed_sequence_out = recipe(PackedGRU, sequences, loss=loss_of_packed)


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
