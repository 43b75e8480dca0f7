"""DDP407 payload-mismatch: error

Ranks put the same number of elements into a collective, packed in another order.

Why: The backend sees flat memory of equal size and dtype. So nothing is raised, and unrelated numbers are added up.
Fix: Pack in one order on every rank: sort the names before flattening, and send missing entries as zeros.
Detected: `ddpcheck report` repeats the step with the same samples on every rank. DDP407 is reported if the ranks then
    put the same numbers into a reduction, but in a different order.
Ignore: Never.
Example:
    flat = torch.cat([losses[name] for name in losses])   # the order of insertion differs by rank
    dist.all_reduce(flat)                    # right: for name in sorted(losses)
"""
