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
Line: The line that sets the attribute; if it is not known, the line that constructs the wrapper.

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
        batch_size = loader.batch_size * training.world_size
        if loader.trains and batch_size != GLOBAL_BATCH_SIZE:
            yield make_finding(
                "LAB001",
                (loader.dataset,),
                f"The global batch size is {batch_size}, and {GLOBAL_BATCH_SIZE} is configured.",
                location=loader.built_at or loader.location,
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
                location=wrapper.attributes_at or wrapper.location,
            )


# Examples, for `ddpcheck test-rule`. They import torch when they run: `ddpcheck rules` does not need it.


def broken_lab001() -> None:
    from lab_training import train

    train(GLOBAL_BATCH_SIZE, on_wrapper=False)


def fixed_lab001() -> None:
    from lab_training import train

    train(GLOBAL_BATCH_SIZE // 2, on_wrapper=False)


def broken_lab002() -> None:
    from lab_training import train

    train(on_wrapper=True)


def fixed_lab002() -> None:
    from lab_training import train

    train(on_wrapper=False)
