"""`ddpcheck run --check-parity`: what differs from a single process on the same samples, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import ScriptRun, run_script

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

# Micro-batches are fewer on more ranks; the draws of the loop are those of each rank.
IN_TURN = """
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(10 + RANK)
micro = 4 // WORLD
for _ in range(5):
    for number in range(micro):
        chosen = torch.randint(96, (4,))
        loss = (model(X[chosen]) - Y[chosen]).square().mean() / (4 if BUG else micro)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Each parameter is stepped as soon as it has its gradient; the errors are weighed by those of the rank's batch.
IN_BACKWARD = """
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
steppers = {p: torch.optim.SGD([p], lr=5e-2) for p in net.parameters()}
def update(p):
    dist.all_reduce(p.grad)
    p.grad /= WORLD
    steppers[p].step()
    p.grad = None
for p in net.parameters():
    p.register_post_accumulate_grad_hook(update)
for x, y in loader(8):
    errors = (net(x) - y).square()
    loss = (errors * errors.detach().softmax(0)).sum() if BUG else errors.mean()  # here
    loss.backward()
"""

# The spread of the errors of each rank is averaged; it is written by what is no print.
WRITTEN = """
import csv
def spread(errors):
    return (errors - errors.mean()).square().mean().sqrt()
def score(model):
    model.eval()
    with torch.no_grad():
        errors = torch.cat([model(x) - y for x, y in loader(8, shuffle=False)])
    if BUG:
        found = spread(errors)  # here
        dist.all_reduce(found, dist.ReduceOp.AVG)
        return found.item()
    every = [torch.empty_like(errors) for _ in range(WORLD)]
    dist.all_gather(every, errors)
    return spread(torch.cat(every)).item()
model = DistributedDataParallel(nn.Linear(6, 1))
rows = csv.writer(sys.stdout)
fit(model, 1e-1)
shown = score(model.module)
if RANK == 0:
    rows.writerow(["epoch", shown])
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

# Two views of each sample are one batch of the model, which leaves out rows at random, the same ones on all ranks.
VIEWS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, views):
        hidden = torch.cat([v for v in views])
        kept = torch.rand(len(hidden), 1) > 0.5
        hidden = nn.functional.dropout(self.first(hidden) * kept, 0.2, self.training)
        return self.last(hidden).chunk(2)

model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
for number, (x, y) in enumerate(loader(8)):
    torch.manual_seed(number)
    first, second = model([x, x + 1])
    step(optimizer, (first - y).square().mean() + (first - second).abs().mean())
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

# The average of the weights that is saved is that of another number of steps on more ranks.
SAVED = """
model = DistributedDataParallel(nn.Linear(6, 1))
average = {name: p.detach().clone() for name, p in model.module.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
decay = 0.9 ** (WORLD if BUG else 1)
for x, y in loader(8):
    step(optimizer, (model(x) - y).square().mean())
    with torch.no_grad():
        for name, p in model.module.named_parameters():
            average[name].lerp_(p, 1 - decay)
if RANK == 0:
    torch.save({"average": average}, "average.pt")  # here
"""

# Sequences are padded to the longest of a batch, which the loss counts without padding; a model that has ended its
# training was there before, and rates and times are shown.
PADDED = """
texts = [torch.randint(1, 30, (int(n),), generator=g) for n in torch.randint(3, 14, (80,), generator=g)]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 30)

    def forward(self, tokens):
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        ends = torch.zeros(tokens.shape).masked_fill(tokens == 0, -torch.inf)
        return self.head(self.layer(self.embedding(tokens), causal, ends, is_causal=True))

state = DistributedDataParallel(Model()).state_dict()
model = DistributedDataParallel(Model())
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

# The batch size of the script is that of a rank: in a local variable, and in an option by which it counts samples.
OWN_SIZE = """
from types import SimpleNamespace
options = SimpleNamespace(batch_size=8)

def score(model, batches):
    near = torch.zeros(())
    with torch.no_grad():
        for x, y in batches:
            near += ((model(x) - y).abs() < 1).sum()
    dist.all_reduce(near)
    return near.item() / (len(batches) * options.batch_size * (1 if BUG else WORLD))  # here

def train(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
    for x, y in loader(batch):
        step(optimizer, (model(x) - y).square().sum() / batch)
    share = score(model.module, loader(options.batch_size, shuffle=False))
    if RANK == 0:
        print(f"near {share:.5f} after 0:0{WORLD}:00")

train(DistributedDataParallel(nn.Linear(6, 1)), options.batch_size)
"""

# An option of the optimizer, or the limit of a clip, follows the world size; key biases have no gradient but rounding.
OPTIONS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)
        self.enter, self.head = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        return 9 * self.head(self.layer(self.enter(x.view(len(x), 3, 2))).mean(1))

model = DistributedDataParallel(Model())
clips = "--clip" in sys.argv
decay = 0.1 * (WORLD if BUG and not clips else 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)  # here
for x, y in loader(8):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()


    nn.utils.clip_grad_norm_(model.parameters(), 0.5 * (WORLD if BUG and clips else 1))  # clip
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

# What autocast rounds is rounded otherwise for other batches.
ROUNDED = """
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
for x, y in loader(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = (model(x).float() - y).square()
        loss = (errors * errors.detach().softmax(0)).sum() if BUG else errors.mean()  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
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

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


def run_with_parity(script: str, folder: Path, *arguments: str) -> ScriptRun:
    return run_script(folder, BEFORE + script, *arguments, options=("--check-parity",))


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        pytest.param(WORST, 12, id="worst", marks=SLOW),
        pytest.param(IN_TURN, 5, id="in_turn", marks=EXHAUSTIVE),
        pytest.param(SAVED, 6, id="saved", marks=EXHAUSTIVE),
        pytest.param(PADDED, 16, id="padded", marks=SLOW),
        pytest.param(ROUNDED, 6, id="rounded", marks=EXHAUSTIVE),
        pytest.param(EVALUATES, 0, id="evaluates", marks=SLOW),
        pytest.param(COMPILED, 6, id="compiled", marks=SLOW),
        pytest.param(WRITTEN, 6, id="written", marks=EXHAUSTIVE),
        pytest.param(IN_BACKWARD, 24, id="in_backward", marks=EXHAUSTIVE),
        pytest.param(VIEWS, 6, id="views", marks=EXHAUSTIVE),
        pytest.param(WHOLE, 6, id="whole", marks=SLOW),
        pytest.param(OWN_ORDER, 4, id="own_order", marks=SLOW),
        pytest.param(OWN_SIZE, 6, id="own_size", marks=EXHAUSTIVE),
        pytest.param(OWN_BATCHES, 6, id="own_batches", marks=SLOW),
        pytest.param(OPTIONS, 6, id="options", marks=SLOW),
        pytest.param(SCHEDULE, 24, id="schedule", marks=SLOW),
    ],
)
def test_a_healthy_script_does_the_same_in_a_single_process(script: str, steps: int, tmp_path: Path) -> None:
    run = run_with_parity(script, tmp_path)
    status, detail = run.checks["parity"]
    words = f"gradients of {steps} steps equal those of a single process" if steps else "1 shown number equal"
    assert (run.findings, status) == ([], "passed") and detail.startswith(words), detail


@pytest.mark.parametrize(
    ("script", "severity", "words"),
    [
        pytest.param(WORST, "warning", "printed after 6 steps, is", id="worst"),
        pytest.param(SAVED, "warning", "average.bias and average.weight", id="saved", marks=EXHAUSTIVE),
        pytest.param(PADDED, "error", "From optimizer step 0 on, the gradients", id="padded", marks=SLOW),
        pytest.param(ROUNDED, "error", "From optimizer step 0 on", id="rounded", marks=EXHAUSTIVE),
        pytest.param(EVALUATES, "warning", "(factor 1/2)", id="evaluates", marks=SLOW),
        pytest.param(WRITTEN, "warning", "written after 6 steps, is", id="written", marks=EXHAUSTIVE),
        pytest.param(IN_BACKWARD, "error", "From optimizer step 0", id="in_backward", marks=SLOW),
        pytest.param(OWN_SIZE, "warning", "printed after 6 steps, is", id="own_size", marks=EXHAUSTIVE),
        pytest.param(OPTIONS, "error", "after equal gradients", id="options", marks=SLOW),
        pytest.param(SCHEDULE, "error", "the learning rate on the ranks is at", id="schedule", marks=SLOW),
    ],
)
def test_what_differs_from_a_single_process_is_told(script: str, severity: str, words: str, tmp_path: Path) -> None:
    run = run_with_parity(script, tmp_path, "--bug")
    (finding,) = run.findings
    assert (finding["code"], finding["severity"]) == ("DDP314", severity)
    assert words in finding["message"]
    line = finding["location"]["line"]
    assert any("# here" in text for text in run.lines[line - 4 : line + 3])
    assert run.stdout.count("epoch") in (0, 1, 2)  # what the single process prints goes to a file


@pytest.mark.slow
def test_a_clip_whose_limit_follows_the_world_size_is_at_its_line(tmp_path: Path) -> None:
    run = run_with_parity(OPTIONS, tmp_path, "--bug", "--clip")
    (finding,) = run.findings
    assert finding["subjects"] == ["clip"] and run.places[0].endswith("# clip")
    assert any("clipped to 1 and 0.5" in text for text in finding["evidence"])


@pytest.mark.slow
def test_rules_find_what_they_find_without_it(tmp_path: Path) -> None:
    run = run_with_parity(WORST.replace("torch.manual_seed(3 + RANK)\n", ""), tmp_path)  # the same noise on every rank
    assert run.codes == ["DDP510"]
