"""Models of many kinds, with their layers, norms and precisions, in which there is nothing to find."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations

from ddpcheck import Recipe


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)


def tokens(classes: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randint(classes, shape, generator=torch.Generator().manual_seed(step))


def to_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.flatten(1).sum(1)).square().mean()


def to_input(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    return (output - batch[:, : output.shape[1]]).square().mean()


def to_one(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def labelled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def recipe(*layers: Callable[[], nn.Module], **options: Any) -> Recipe:
    """A recipe whose model has these layers, one after the other."""
    model = layers[0] if len(layers) == 1 else lambda: nn.Sequential(*(layer() for layer in layers))
    return Recipe(**{"model": model, "batch": normal(12, 8), "loss": to_sum, **options})


def linear(inputs: int, outputs: int, **options: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inputs, outputs, **options)


# Layers


class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 8, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.gru(x)[0][:, -1], 0.1, self.training))


# Dropout between the layers of a GRU, which no dropout module shows, and some by `functional.dropout`.
dropout_rnn = recipe(GRU, batch=normal(12, 5, 4))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        return self.head(self.encoder(x, mask=mask.to(x.dtype), is_causal=True))


# A language model with dropout whose head and embedding share one weight.
transformer_tied_dropout = recipe(
    Transformer,
    batch=tokens(20, 12, 8),
    loss=lambda model, batch: F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
)


class StatefulLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(t.detach() for t in hidden)
        return self.head(y)


# A recurrent model carries its detached hidden state from step to step in an attribute.
stateful_rnn = recipe(
    StatefulLSTM, batch=normal(12, 5, 4), loss=lambda model, b: (model(b)[..., 0] - b.sum(2)).square().mean()
)


def images_and_labels(size: int, *shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(size, *shape, generator=generator), torch.randint(3, (size,), generator=generator)

    return batch


# A convolutional network with GroupNorm: no sample depends on another.
conv_groupnorm = recipe(
    *(lambda: nn.Conv2d(1, 8, 3), lambda: nn.GroupNorm(2, 8), lambda: nn.ReLU(inplace=True)),
    *(lambda: nn.Conv2d(8, 8, 3), lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten, linear(8, 4)),
    batch=images_and_labels(12, 1, 8, 8),
    loss=labelled,
)


class FrozenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(4 * 6, 1)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.train()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x[:, None])).relu().flatten(1))


# A pretrained BatchNorm that stays in evaluation mode, as in detection: its statistics never change.
batchnorm_eval = recipe(FrozenNorm)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8, padding_idx=0), nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(F.pad(tokens, (0, 1))).mean(1))


# An embedding whose padding row never gets a gradient, and whose other rows get one in some steps only.
embedding_padding_idx = recipe(Padded, batch=tokens(40, 12, 3), loss=to_one)


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8))


# A layer that filters in the Fourier domain with complex weights.
complex_parameters = recipe(Filter)


class DropPath(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        branch = super().forward(x).tanh()
        return x + branch * (torch.rand(len(x), 1, device=x.device) < 0.8) / 0.8 if self.training else x + branch


# Stochastic depth by `torch.rand`.
drop_path = recipe(*[lambda: DropPath(8, 8)] * 2, linear(8, 1))
# A randomised leaky ReLU draws a slope for each element.
rrelu = recipe(linear(8, 16), nn.RReLU, linear(16, 1))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 8) / 8**0.5)
        self.lora_b = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


# A low-rank adapter on a frozen layer: B starts at zero, so the gradient of A is zero in the first step only.
lora = recipe(Adapted, loss=to_input)
backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
# model() hands out a backbone that lives in a global.
global_backbone = recipe(lambda: backbone, linear(16, 1))


class EmptyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(8, 1), nn.Parameter(torch.empty(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.extra.T).sum(1, keepdim=True)


# A parameter has no elements.
zero_size_param = recipe(EmptyParameter)


# Norms of weights


def ignoring_warnings(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer of a kind that is deprecated, and still in many models."""

    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return layer()

    return build


old_weight = ignoring_warnings(lambda: nn.utils.weight_norm(nn.Linear(8, 8)))
# Weight normalisation of the old kind: a hook sets a non-leaf attribute, so the module cannot be deep-copied.
old_weight_norm = recipe(old_weight, nn.Tanh, ignoring_warnings(lambda: nn.utils.weight_norm(nn.Linear(8, 1))))
# The same beside a parametrisation, whose classes torch makes anew for each module.
old_weight_norm_beside_new = recipe(
    *(old_weight, nn.Tanh, lambda: parametrizations.orthogonal(nn.Linear(8, 8)), linear(8, 1))
)
# The old kind: a hook, two buffers and a plain attribute in place of the weight.
old_spectral_norm = recipe(
    *(ignoring_warnings(lambda: nn.utils.spectral_norm(nn.Linear(8, 8))), nn.Tanh, linear(8, 4)), loss=to_input
)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.2, 0.2)
        return self.head(x)


# The forward pass clips the weights in place, as a critic does: on every rank to the same values.
weights_clipped_in_forward = recipe(Clipped)


# Precision


# A model in float64.
double_precision = recipe(
    lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)).double(),
    batch=normal(12, 8, dtype=torch.float64),
)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, dtype=torch.bfloat16), nn.Linear(16, 1, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(x.to(self.last.weight.dtype)).float()


# Linear layers in bfloat16 around a LayerNorm in float32.
mixed_dtypes = recipe(Mixed)


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        prediction = model(batch)
    return (prediction.float()[:, 0] - batch.sum(1)).square().mean()


# Parameters in float32, products in bfloat16 under autocast.
autocast_bfloat16 = recipe(linear(8, 16), lambda: nn.LayerNorm(16), nn.GELU, linear(16, 1), loss=autocast_loss)

SEED = 330  # one in about a hundred loses so much


def seeded_layers() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def alternating_targets(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * SEED + step)
    return 0.01 * torch.randn(48, 4, generator=generator), torch.arange(48).fmod(2).float()


# Large terms all but cancel in the gradient of a single number, a bias: it loses more on shards than at once.
near_cancelling_bias = recipe(
    seeded_layers,
    batch=alternating_targets,
    loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1]),
)


# Collectives with a gradient


class AllReduce(Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return AllReduce.forward(ctx, gradient.contiguous())


class AllGather(Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return AllReduce.forward(ctx, gradient.contiguous()).chunk(dist.get_world_size())[dist.get_rank()]


class Contrastive(nn.Module):
    """Contrastive learning against the samples of all ranks, with a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        sides = [F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)]
        left, right = map(AllGather.apply, sides) if dist.is_available() and dist.is_initialized() else sides
        return self.log_scale.exp() * left @ right.T


def contrastive_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch, batch.roll(1, 1))
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


# Every rank computes the global loss; the gather returns the sum of all ranks' gradients, DDP's average undoes it.
allgather_contrastive = recipe(Contrastive, loss=contrastive_loss)
