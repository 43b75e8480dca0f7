"""DDP314 differs-from-single-process: error

The script's results on several ranks differ from those of a single process on the same samples.

Why: The reference for data-parallel training is one process on the global batch. Gradients, evaluation results and
    checkpoints should be the same, however many ranks share the samples. A result that differs changes with the
    number of ranks, and no error is raised. (PyTorch docs, DistributedDataParallel: if a loss is summed over the
    samples and not averaged, the gradient is M times smaller on M nodes than on one node with the whole batch.)
Fix: At the line, look for a value of one rank's samples that is used as if it covered all samples: a mean, a maximum
    or a normaliser of the rank's batch, a mean of the ranks' results, a division by the size of the whole dataset, a
    count of the rank's own steps. Compute it over all ranks, with an all_reduce before it is used (sums and counts
    for a mean, MAX for a maximum).
Detected: `ddpcheck run --check-parity` runs the script on the ranks, and again in a single process. The single
    process gets the batches and the random numbers of all ranks together. ddpcheck compares the gradients of each
    optimizer step, the final learning rates and the number of steps. It also compares the numbers that are shown
    after an evaluation, and the tensors that torch.save saves. Differences in these are warnings. The ranks together
    must also get at least three quarters of the samples of an epoch. If something differs, a third run in another
    order of samples measures noise. A difference of up to four times the noise is not reported. The single process
    acts as rank 0. A difference in gradients is reported only if the single process has the same gradients when it
    acts as rank 1. So code that depends on the rank number is not blamed. If a finding of another rule may explain
    the difference, DDP314 is not reported. The line of this check in the report then names the other rule.
Ignore: If the value should cover the rank's own samples only, as the negatives of a contrastive loss may.
Example:
    weights = errors.detach().exp()
    loss = (weights / weights.mean() * errors).mean()   # right: all_reduce weights.mean() (AVG) first
"""
