"""The loss draws a random mask, and takes the mean over the tokens that its own rank has masked.

No two ranks mask as many, so a token weighs more on a rank with few masked ones.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP305",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "by a random mask",
}
MASK = 30


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 32), nn.Dropout(), nn.GELU(), nn.Linear(32, 31))


def batch(step: int) -> Tensor:
    return torch.randint(0, MASK, (8, 10), generator=torch.Generator().manual_seed(step))


def masked_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the masked tokens, and how many they are."""
    masked = torch.rand(tokens.shape) < 0.3
    logits = model(tokens.masked_fill(masked, MASK))
    return cross_entropy(logits[masked], tokens[masked], reduction="sum"), masked.sum()


def local_count(model: nn.Module, tokens: Tensor) -> Tensor:
    total, count = masked_loss(model, tokens)
    return total / count


def global_count(model: nn.Module, tokens: Tensor) -> Tensor:
    total, count = masked_loss(model, tokens)
    world_size = 1
    if dist.is_initialized():
        dist.all_reduce(count)
        world_size = dist.get_world_size()
    return total * world_size / count


broken = Recipe(model=model, batch=batch, loss=local_count)
fixed = Recipe(model=model, batch=batch, loss=global_count)
