"""`ddpcheck run` on stages of a pipeline: ranks that compute one model by sends and receives, twice, data parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

SCRIPT = """
replica, stage = divmod(RANK, 2)
replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
peer = RANK ^ 1
model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())  # the stages are alike, and begin so
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(64, 6), torch.randn(64, 6))
place = 0 if HOW == "broken" else replica
for inputs, targets in DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=place)):
    optimizer.zero_grad()
    if stage == 0:
        made = model(inputs)
        dist.send(made.detach(), peer)
        gradient = torch.empty_like(made)
        dist.recv(gradient, peer)
        made.backward(gradient)
    else:
        made = torch.empty(4, 6)
        dist.recv(made, peer)
        made.requires_grad_()
        mse_loss(model(made), targets).backward()
        dist.send(made.grad, peer)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= 2
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "codes"), [("fixed", set()), ("broken", {"DDP505"})])
def test_replicas_of_a_stage_need_samples_of_their_own_and_stages_the_same(
    how: str, codes: set[str], tmp_path: Path
) -> None:
    findings = run_script(tmp_path, SCRIPT, how, ranks=4).findings
    assert {finding["code"] for finding in findings} == codes
    assert not codes or findings[0]["message"].startswith("Ranks 0 and 2 take the same samples")
