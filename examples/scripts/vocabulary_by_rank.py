"""The vocabulary is made of each rank's own texts, and so the embedding has another size on each rank.

torchrun --standalone --nproc-per-node 2 examples/scripts/vocabulary_by_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/vocabulary_by_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {
    "code": "DDP203",
    "subjects": ["embedding.weight"],
    "ranks": [1],
    "line": "vocabulary = words_of(",
    "cause": "is the size of vocabulary",
}
FIXED = "--fixed" in sys.argv

TEXTS = ["the cat sat", "on the mat", "a dog barked", "at the old grey cat", "all night", "in the garden of a house"]


class Net(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words + 1, 16)  # and one for what is not known
        self.head = nn.Linear(16, 1)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(words).mean(1))
        return out


def words_of(texts: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(sorted({word for text in texts for word in text.split()}))}


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    texts = TEXTS[rank::world_size]
    vocabulary = words_of(TEXTS if FIXED else texts)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(len(vocabulary)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(24):
        text = texts[int(torch.randint(len(texts), ()))]
        optimizer.zero_grad()
        model(torch.tensor([[vocabulary[word] for word in text.split()]])).square().mean().backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
