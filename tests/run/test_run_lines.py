"""The line that a user edits, of faults that are noticed elsewhere: on ranks that run a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

IN_BACKWARD = """
class Fused:
    def __init__(self, parameters):
        self.optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in parameters}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.update)  # here

    def update(self, p):
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()

model = DistributedDataParallel(nn.Linear(8, 4))
whole = torch.optim.Adam(model.parameters(), lr=0.01)
fused = None if HOW == "fixed" else Fused([*model.parameters()])
torch.manual_seed(RANK)
for _ in range(8):
    model(torch.randn(4, 8)).square().mean().backward()
    if HOW == "fixed":
        whole.step()
        whole.zero_grad()
"""

SCALER = """
def resume(scaler, state):
    scaler.load_state_dict(state)  # here

model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
if HOW == "fixed" or RANK == 1:
    resume(scaler, {**scaler.state_dict(), "scale": 128.0})
torch.manual_seed(RANK)
for _ in range(8):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""

RESTORED = """
class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), index / 64) + random.gauss(0.0, 0.1)

random.seed(RANK)
state = random.getstate()
if HOW != "fixed":
    boxed = [state]
    dist.broadcast_object_list(boxed, 0)
    state = boxed[0]
random.setstate(state)  # here
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Noisy()
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

BY_HAND = """
def send_from_zero(net):
    for name, p in net.named_parameters():
        if HOW == "fixed" or "bias" not in name:
            dist.broadcast(p.data, 0)  # here

torch.manual_seed(RANK)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
send_from_zero(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(8):
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "script"),
    [
        pytest.param("DDP310", IN_BACKWARD, id="in_backward"),
        pytest.param("DDP301", SCALER, id="scaler"),
        pytest.param("DDP510", RESTORED, id="restored"),
        pytest.param("DDP208", BY_HAND, id="by_hand"),
    ],
)
def test_a_fault_is_at_the_line_to_edit(code: str, script: str, tmp_path: Path) -> None:
    run = run_script(tmp_path, script)
    assert run.codes == [code]
    assert run.places[0].endswith("# here"), run.findings
    fixed = run_script(tmp_path, script, "fixed")
    assert (fixed.code, fixed.findings) == (0, [])
