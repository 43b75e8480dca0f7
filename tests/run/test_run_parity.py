"""`ddpcheck run --check-parity`: what differs from a single process on the same samples, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import ScriptRun, run_script
from tests.tiers import share

BEFORE = """
BUG = "--bug" in sys.argv
g = torch.Generator().manual_seed(5)
X = torch.randn(96, 6, generator=g)
Y = X[:, :2].sum(1, keepdim=True) + 0.1 * torch.randn(96, 1, generator=g)
everything = TensorDataset(X, Y)
torch.manual_seed(3)

def loader(batch_size, **named):
    return DataLoader(everything, batch_size, sampler=DistributedSampler(everything, **named))

def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def fit(model, rate=5e-2):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for x, y in loader(8):
        step(optimizer, (model(x) - y).square().mean())
"""

# The largest error of each rank is averaged over the ranks.
WORST = """
def error(model):
    model.eval()
    worst = torch.zeros(())
    with torch.no_grad():
        for x, y in loader(8, shuffle=False):
            worst = torch.maximum(worst, (model(x) - y).abs().max())
    dist.all_reduce(worst, dist.ReduceOp.AVG if BUG else dist.ReduceOp.MAX)  # here
    return worst.item()

net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + RANK)
batches = loader(8)
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    model.train()
    seen, near, count = [], 0, 0
    for x, y in batches:
        out = model(x + 0.05 * torch.randn_like(x))
        near, count = near + ((out - y).abs() < 1).sum().item(), count + len(y)
        loss = nn.functional.mse_loss(out, y)
        step(optimizer, loss)
        seen.append(loss.item())
    mean = sum(seen) / len(seen)
    if RANK == 0:
        worst = error(model.module)
        print(f"epoch {epoch} loss {mean:.5f} near {near / count:.5f} error {worst:.5f}")
    else:
        error(model.module)
"""


# Each rank takes the samples that it has made in an order of its own.
OWN_ORDER = """
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
torch.manual_seed(3 + RANK)
for _ in range(4):
    made = torch.randn(24 // WORLD, 6)
    order = torch.randperm(len(made))
    step(optimizer, (model(made[order]) - made[order].sum(1, keepdim=True)).square().mean())
"""


# Means over batches depend on their size: all ranks evaluate the same samples, and rank 0 others.
WHOLE = """
model = DistributedDataParallel(nn.Linear(6, 1))
shared, of_rank_0 = (DataLoader(TensorDataset(X[:n], Y[:n]), 4) for n in (21, 33))

@torch.no_grad()
def mean(batches):
    return sum(nn.functional.mse_loss(model.module(x), y).item() for x, y in batches) / len(batches)

fit(model)
error = mean(shared)
if RANK == 0:
    print(f"error {error:.5f} other {mean(of_rank_0):.5f}")
dist.barrier()
"""


# Sequences are padded to the longest of a batch, which the loss counts without padding; a model that has ended its
# training was there before, and rates and times are shown.
PADDED = """
texts = [torch.randint(1, 30, (int(n),), generator=g) for n in torch.randint(3, 14, (80,), generator=g)]

def made():
    return DistributedDataParallel(nn.Sequential(nn.Embedding(30, 8), nn.Dropout(0.2), nn.Linear(8, 30)))

state = made().state_dict()
model = made()
model.load_state_dict(state)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 * WORLD)
sampler = DistributedSampler(texts)
batches = DataLoader(texts, 5, sampler=sampler, collate_fn=lambda some: nn.utils.rnn.pad_sequence(some, True))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for tokens in batches:
        targets = tokens[:, 1:]
        count = (targets > 0).sum().float()
        if BUG:
            count /= WORLD
        dist.all_reduce(count, dist.ReduceOp.AVG)
        scores = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, targets.flatten(), ignore_index=0, reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()  # here
        optimizer.step()
    model.eval()
    rate = optimizer.param_groups[0]["lr"]
    took = time.perf_counter()
    print(f"took {took:.4f} lr {rate:.4f}")
    model.train()
"""


# An option of the optimizer follows the world size; key biases have no gradient but rounding.
OPTIONS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)
        self.enter, self.head = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        return 9 * self.head(self.layer(self.enter(x.view(len(x), 3, 2))).mean(1))

model = DistributedDataParallel(Model())
decay = 0.1 * (WORLD if BUG else 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)  # here
for x, y in loader(8):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
if RANK == 0:
    torch.save(model.module.state_dict(), "model.pt")
"""

# The cosine of a schedule with a floor is over after half of the steps.
SCHEDULE = """
import math
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 * WORLD)
batches = loader(4)
length = 2 * len(batches) // (WORLD if BUG else 1)
schedule = torch.optim.lr_scheduler.LambdaLR(  # here
    optimizer, lambda n: 0.6 + 0.4 * math.cos(math.pi * min(1.0, n / length))
)
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        step(optimizer, (model(x) - y).square().mean())
        schedule.step()
"""


# What TorchScript compiles calls functions that are others in the single process.
COMPILED = """
@torch.jit.script
def widened(x, p: float):
    return nn.functional.dropout(torch.cat([x, 0 * torch.rand_like(x)], 1), p)

model = DistributedDataParallel(nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
for x, y in loader(8):
    step(optimizer, (model(widened(x, 0.0)) - y).square().mean())
"""

# The script trains nothing.
EVALUATES = """
model = DistributedDataParallel(nn.Linear(6, 1)).eval()
near = torch.zeros(2)
with torch.no_grad():
    for x, y in loader(8, shuffle=False):
        near += torch.tensor([((model(x) - y).abs() < 1).sum(), len(y)])
if BUG:
    near[1] = len(everything)
dist.all_reduce(near)
if RANK == 0:
    print(f"near {near[0] / near[1]:.4f}")  # here
"""


# Batches have a part of the script's own, which has no batch dimension; the loader of the single process has its rows.
OWN_BATCHES = """
class Padded:
    def __init__(self, items):
        self.x = torch.stack([x for x, _ in items])

def collate(items):
    return Padded(items), torch.stack([y for _, y in items])

model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
for padded, y in DataLoader(everything, 8, sampler=DistributedSampler(everything), collate_fn=collate):
    step(optimizer, (model(padded.x) - y).square().mean())
"""


def run_with_parity(script: str, folder: Path, *arguments: str) -> ScriptRun:
    return run_script(folder, BEFORE + script, *arguments, options=("--check-parity",))


HEALTHY = {
    **{"worst": (WORST, 12), "padded": (PADDED, 16), "evaluates": (EVALUATES, 0), "compiled": (COMPILED, 6)},
    **{"whole": (WHOLE, 6), "own_order": (OWN_ORDER, 4), "own_batches": (OWN_BATCHES, 6), "options": (OPTIONS, 6)},
    "schedule": (SCHEDULE, 24),
}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "steps"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_script_does_the_same_in_a_single_process(script: str, steps: int, tmp_path: Path) -> None:
    run = run_with_parity(script, tmp_path)
    status, detail = run.checks["parity"]
    words = f"gradients of {steps} steps equal those of a single process" if steps else "1 shown number equal"
    assert (run.findings, status) == ([], "passed") and detail.startswith(words), detail


BROKEN = {
    "worst": (WORST, "warning", "printed after 6 steps, is"),
    "padded": (PADDED, "error", "From optimizer step 0 on, the gradients"),
    "evaluates": (EVALUATES, "warning", "(factor 1/2)"),
    "options": (OPTIONS, "error", "after equal gradients"),
    "schedule": (SCHEDULE, "error", "the learning rate on the ranks is at"),
}


@pytest.mark.parametrize("name", share(BROKEN, ["worst"]))
def test_what_differs_from_a_single_process_is_told(name: str, tmp_path: Path) -> None:
    script, severity, words = BROKEN[name]
    run = run_with_parity(script, tmp_path, "--bug")
    (finding,) = run.findings
    assert (finding["code"], finding["severity"]) == ("DDP314", severity)
    assert words in finding["message"]
    line = finding["location"]["line"]
    assert any("# here" in text for text in run.lines[line - 4 : line + 3])
    assert run.stdout.count("epoch") in (0, 1, 2)  # what the single process prints goes to a file
