"""DDP804 targets-without-offset: error

Targets index rows gathered from all ranks, without the offset of the rank's own rows.

Why: In the result of all_gather, the rows of rank r begin at r * batch size. With targets arange(batch size) on every
    rank, all ranks except the first learn to match their samples with those of rank 0.
Fix: Add the offset: targets = torch.arange(len(x)) + rank * len(x).
Detected: In some steps, `ddpcheck run` checks cross entropies whose logits compare features with a gathered matrix
    (products, cosine similarity, torch.cdist). It finds the rank's own rows in the matrix. DDP804 is reported if
    three conditions hold. Each rank's rows begin at a different index. All ranks have the same targets, or the
    targets of each rank are consecutive numbers. At least one rank has no target among its own rows, and at least one
    other rank has such a target. Not covered: other losses, differences that the script computes itself, and rows
    that pass through a layer after the gather.
Ignore: If the positives of a rank are rows of another rank on purpose.
Example:
    logits = features @ torch.cat(all_gather(features)).T
    loss = cross_entropy(logits, torch.arange(len(features)))  # right: + rank * len(features)
"""
