"""Each rank numbers the classes in the order in which it meets them.

Class 0 of one rank is class 2 of another. Shapes and names agree, so nothing is raised: the ranks' gradients pull the
head in different directions.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP516",
    "subjects": ["labels"],
    "ranks": [1],
    "severity": "error",
    "cause": "rank 1: {'dog': 0, 'cat': 1, 'owl': 2}",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


SEEN = (("cat", "dog", "owl"), ("dog", "cat", "owl"))  # a listing of each rank's folder


class Net(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.labels = {name: number for number, name in enumerate(names)}

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        targets = torch.tensor([self.labels[name] for name in names])
        return nn.functional.cross_entropy(self.head(x), targets)


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "animal": x.abs().argmax(1) % 3}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"], [("cat", "dog", "owl")[i] for i in batch["animal"].tolist()])


broken = Recipe(model=lambda: Net(SEEN[rank()]), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(tuple(sorted(SEEN[rank()]))), batch=batch, loss=loss)
