"""DDP305 loss-normalisation: error

Gradients differ from the single process because the loss is a sum, or a mean over a count that differs between ranks.

Why: DDP gives every rank the same weight. So a sum over samples is divided by the world size. A mean over counts that
    differ (uneven shards, padding masks, ignore_index, weights of samples) becomes a mean of means: a sample counts
    more on a rank with fewer samples. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
Fix: Sum the local loss, all_reduce the count, and divide by count / world_size on every rank.
Detected: DDP gives the gradient of every rank the same weight. DDP305 is reported if the gradient of the global batch
    is a weighted sum of the ranks' gradients, and the weights differ between ranks. DDP305 is also reported if the
    loss weighs samples by values of the rank's own batch, such as class frequencies. The finding names the count that
    each rank divides by, if ddpcheck finds it. `ddpcheck run` measures how much each target counts in the loss. It
    also reports a term of the loss that each rank multiplies by its own constant.
Ignore: If each rank should have the same weight, however many samples it has. A sum is always an error. A mean of
    means is only a warning if its effect is small. In `ddpcheck report`, the effect is small if every gradient is
    within 5 % of the global batch's. In a training loop, the effect is large in two cases: (1) In at least half of
    the steps, an element of the loss (a sample or token) counts at least twice as much on one rank as on another. (2)
    In each of at least five steps, the elements of one rank count more than those of another, always of the same two
    ranks, and by at least 10 % on average. Counts that differ by chance, as with padded batches, favour no rank, and
    many people train this way on purpose.
Reports: pytorch/pytorch#37359 huggingface/transformers#24725
Example:
    loss = (token_loss * mask).sum() / mask.sum()
    # right: total = mask.sum(); dist.all_reduce(total)
    #        loss = (token_loss * mask).sum() * dist.get_world_size() / total
"""
