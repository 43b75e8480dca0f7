"""`language_model.py` with ddpcheck's watch, and nothing else changed.

    torchrun --nproc-per-node 2 examples/accelerate/language_model_checked.py

ddpcheck reports DDP514 (accumulation-scale): the mean of means that `language_model.py` takes.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from ddpcheck.integrations.accelerate import watch

IGNORED, CONTEXT, STEPS = -100, 64, 10
LINES = [line for name in sorted(dir(str)) for line in (getattr(str, name).__doc__ or "").splitlines() if line]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def collate(lines: list[str]) -> tuple[Tensor, Tensor]:
    ids = [torch.tensor([0, *(min(ord(character), 127) for character in line[:CONTEXT])]) for line in lines]
    inputs = pad_sequence([line[:-1] for line in ids], batch_first=True)
    return inputs, pad_sequence([line[1:] for line in ids], batch_first=True, padding_value=IGNORED)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(LINES, batch_size=2, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watched = watch(accelerator, model)
    for number, (tokens, targets) in zip(range(STEPS * 4), loader, strict=False):
        with accelerator.accumulate(model):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % 8 == 7:
            accelerator.print(f"loss {loss.item():.3f}")
    watched.close()


if __name__ == "__main__":
    main()
