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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "script"),
    [("DDP310", IN_BACKWARD), ("DDP301", SCALER)],
    ids=["in_backward", "scaler"],
)
def test_a_fault_is_at_the_line_to_edit(code: str, script: str, tmp_path: Path) -> None:
    run = run_script(tmp_path, script)
    assert run.codes == [code]
    assert run.places[0].endswith("# here"), run.findings
    fixed = run_script(tmp_path, script, "fixed")
    assert (fixed.code, fixed.findings) == (0, [])
