"""DDP507 learning-rate: error

The learning rate differs between ranks, or its schedule makes world_size steps at a time.

Why: The gradients are equal but the updates are not, so parameters diverge from this step on. The usual cause is a
    scheduler that steps on a local metric (ReduceLROnPlateau). (PyTorch docs, DistributedDataParallel: all processes
    must make the same parameter updates.)
Fix: Feed schedulers with values that all ranks share: all_reduce the metric first.
Detected: `ddpcheck run` compares the learning rates at each optimizer step. DDP507 is reported if they are equal at
    first and differ later. A schedule that makes world_size steps at a time instead of one is reported as a warning.
    This is reported only if the schedule ends too early, or if the code calls step() world_size times.
Ignore: If ranks use different rates on purpose.
Explains: DDP306
Example:
    schedule = ReduceLROnPlateau(optimizer)
    schedule.step(loss)                      # the loss of this rank's samples; right: all_reduce it first
"""
