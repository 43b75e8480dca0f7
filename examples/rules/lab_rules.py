"""LAB001 global-batch-size: warning

The batches of all ranks together do not have the global batch size of the configuration.

Why: The learning rate and its warmup are tuned for GLOBAL_BATCH_SIZE samples in an optimizer step.
Fix: Divide the global batch size by the world size for the batch_size of the DataLoader.
Detected: The batch size of each loader that training uses, times the world size, is not GLOBAL_BATCH_SIZE.
Ignore: A script that accumulates gradients over several batches.
Line: The line that constructs the sampler or the DataLoader.

LAB002 attribute-of-wrapper: error

An attribute is set on DistributedDataParallel, and the module continues to use its own.

Why: The wrapper does not forward assignments, so the new value has no effect on the forward pass.
Fix: Set it on the wrapped module, as in ddp.module.temperature = 2.0.
Detected: By the end of the first step, the wrapper has a new attribute that the module has too.
Ignore: The attribute of the wrapper is for the script alone.
Line: The line that constructs the wrapper.

Example:
    ddp = DistributedDataParallel(net)
    ddp.temperature = 2.0  # correct: ddp.module.temperature = 2.0
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.training import Training

GLOBAL_BATCH_SIZE = 16


@rule
def judge_lab001(training: Training) -> Iterator[Finding]:
    """Report the first loader of rank 0 whose batches do not add up to the global batch size."""
    for loader in training.passes[0]:
        global_size = loader.batch_size * training.world_size
        if loader.trains and global_size != GLOBAL_BATCH_SIZE:
            yield make_finding(
                "LAB001",
                (loader.dataset,),
                f"The global batch size is {global_size} ({training.world_size} ranks with batches of "
                f"{loader.batch_size}), and {GLOBAL_BATCH_SIZE} is configured.",
                location=loader.made or loader.location,
            )
            return


@rule
def judge_lab002(training: Training) -> Iterator[Finding]:
    """Report attributes of the module that the script has set on the wrapper."""
    for wrapper in training.wrappers:
        if wrapper.attributes:
            yield make_finding(
                "LAB002",
                wrapper.attributes,
                f"The script sets {', '.join(wrapper.attributes)} on the wrapper; {wrapper.module} does not see it.",
                location=wrapper.location,
            )


# Examples: `ddpcheck test-rule` runs each of them on two ranks. They import torch, and the rules above do not need it.


def broken_lab001() -> None:
    """Train with the global batch size on each rank."""
    _train(batch_size=GLOBAL_BATCH_SIZE)


def fixed_lab001() -> None:
    """Train with a share of the global batch size on each rank."""
    _train(batch_size=GLOBAL_BATCH_SIZE // 2)


def broken_lab002() -> None:
    """Set the temperature on the wrapper."""
    _train(batch_size=8, on_wrapper=True)


def fixed_lab002() -> None:
    """Set the temperature on the module."""
    _train(batch_size=8)


def _train(batch_size: int, *, on_wrapper: bool = False) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.temperature = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.linear(x)
            return logits / self.temperature

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator))
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
    ddp = DistributedDataParallel(Net())
    owner = ddp if on_wrapper else ddp.module
    owner.temperature = 2.0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), labels).backward()
        optimizer.step()
    dist.destroy_process_group()
