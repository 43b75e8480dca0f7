"""forward returns a PackedSequence, a named tuple with a constructor of its own."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def gen(step):
    return torch.Generator().manual_seed(step)


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.GRU(4, 8, batch_first=True)

    def forward(self, x, n):
        return self.l(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[0]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Enc()
        self.h = nn.Linear(8, 1)

    def forward(self, x, n):
        return self.enc(x, n)


def model():
    m = M()
    m.h.requires_grad_(False)
    return m


def batch(step):
    return {"x": torch.randn(12, 6, 4, generator=gen(step)), "n": torch.randint(1, 7, (12,), generator=gen(step))}


def loss(model, b):
    y, _ = pad_packed_sequence(model(b["x"], b["n"]), batch_first=True, total_length=6)
    return y.square().mean()
