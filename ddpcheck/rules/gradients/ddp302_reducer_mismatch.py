"""DDP302 reducer-mismatch: error

DDP's gradients differ from the plain average of the ranks' own gradients.

Why: Without the wrapper, the same module on the same samples gives a different average of the gradients. So the
    difference comes from the wrapper: a communication hook, a second backward pass that was not reduced, gradients
    that existed before the step, or parameters that are paired incorrectly.
Fix: Remove the communication hook and check again; on a sharded module, it is set by set_all_reduce_hook. Or call
    zero_grad() before each accumulation, reduce in the last backward pass of a step, or give the parameters the same
    order on the ranks (DDP202).
Detected: ddpcheck runs the same module on the same samples without the wrapper, and averages the gradients with a
    plain all-reduce. DDP302 is reported if DDP's gradients are the same on all ranks but differ from this average. A
    tolerance for rounding is relative to the ranks' own gradients, before averaging.
Ignore: If a communication hook compresses gradients and you accept its rounding. ddpcheck allows the rounding of
    bfloat16. For a communication hook that the script registers, `ddpcheck run` reports only a note.
Example:
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()                          # only the first of the two is reduced; right: (2 * loss).backward()
"""
