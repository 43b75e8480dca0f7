"""DDP310 gradient-changed-before-reduction: error

A hook, a clip or an optimizer step reads or changes local gradients before they are averaged.

Why: Gradient hooks run before DDP averages. A clip in such a hook clips each rank by its own norm. An optimizer step
    during backward uses the local gradient. The result differs from that of the global batch, and ranks may diverge.
    (PyTorch docs, DistributedDataParallel and register_comm_hook.)
Fix: Clip, scale and step after backward has returned; to act inside the reduction, use register_comm_hook.
Detected: ddpcheck repeats a step with a loss twice as large. DDP310 is reported if the gradients are not twice as
    large. If there are hooks, ddpcheck also compares each rank with a single process on the same samples. DDP310 is
    reported if the losses are equal, but the gradients are not. `ddpcheck run` reports clip_grad_norm_ if the
    gradients are averaged only after the call. It reports hooks whose factor or mask differs between ranks. A
    backward hook of a module that scales gradients is reported only if each rank has its own factor, the same in each
    step. Hooks that clamp the elements of a gradient are reported as a warning, even with the same limit on every
    rank. A hook that steps the optimizer during backward is reported if parameters then differ between ranks.
Ignore: If each rank should clip its own gradients, as some private or robust training does.
Explains: DDP302 if same subjects
Example:
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1, 1))   # right: clip_grad_norm_(model.parameters(), 1.0) after backward
"""
