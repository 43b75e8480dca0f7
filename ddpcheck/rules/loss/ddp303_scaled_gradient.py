"""DDP303 scaled-gradient: error, spreads

Every gradient is the reference gradient times a constant, such as the world size or its inverse.

Why: DDP averages gradients over the ranks. If the loss is also divided by the world size, the gradients are divided
    twice. If the loss is multiplied by the world size, or contains an all-reduce, the gradients are multiplied. So
    the effective learning rate changes with the number of ranks. (PyTorch docs, DistributedDataParallel: gradients
    are averaged.)
Fix: Make the loss a mean over the local batch and do not scale it by the world size; for a sum, multiply the loss by
    the world size.
Detected: All gradients differ from the reference by the same factor, within rounding. The reference is a single
    process on the global batch, or the plain average of the ranks' own gradients. `ddpcheck run` looks for the causes
    in the script: (1) The loss is a mean, and the script divides or multiplies it by the world size. (2) The loss is
    a sum divided by a count over all ranks (such as the tokens of the global batch), and is not multiplied by the
    world size. (3) The script scales gradients by the world size, in a hook or after they are averaged. (4) The loss
    covers the features of all ranks, but its gradient reaches only the rank's own features. (5) A script without a
    wrapper sums gradients over the ranks, and does not divide the sum. The steps of some optimizers, such as Adam, do
    not depend on the scale of gradients. With such an optimizer, cases 3 and 4 are mostly not reported. Case 5 is
    then reported only if gradients are clipped.
Ignore: If the learning rate was tuned with this factor. But the factor changes with the number of ranks.
Explains: quietly DDP302 if a note
Reports: neuralmagic/sparseml#135 facebookresearch/3detr#56 ultralytics/ultralytics#18616
Example:
    loss = cross_entropy(model(x), y) / dist.get_world_size()   # DDP divides already; right: no division
"""
