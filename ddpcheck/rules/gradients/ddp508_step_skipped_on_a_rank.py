"""DDP508 step-skipped-on-a-rank: error

A rank skips a backward pass or an optimizer step that the others make.

Why: One rank skips a step (NaN, out of memory). From then on, its gradients are silently averaged with those of a
    different step on the other ranks. At the end, one rank has no steps left and the job hangs.
Fix: all_reduce the decision, so that all ranks skip the step or none does.
Detected: ddpcheck compares how many backward passes and optimizer steps each rank makes between two averages of
    gradients, and reports differences. `ddpcheck run` also compares the numbers of forward passes and batches. If a
    rank takes more batches than usual before an average, it has skipped a backward pass. Such skips are reported if
    at least two ranks skip different passes. If the numbers vary much, or more than three passes in a row are
    skipped, nothing is reported.
Ignore: If a rank skips a step on purpose and its parameters are synchronised afterwards.
Explains: DDP306
Reports: NVIDIA-NeMo/Automodel#2468 ecmwf/WeatherGenerator#2718 pytorch/pytorch#64636
Example:
    if torch.isfinite(loss):                 # right: all_reduce the decision first
        optimizer.step()
"""
