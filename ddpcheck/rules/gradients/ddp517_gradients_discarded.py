"""DDP517 gradients-discarded: error

Gradients are zeroed or replaced before an optimizer step has used them.

Why: A zero_grad between backward and step, or in every micro-step of an accumulation, discards gradients that were
    computed and reduced. The model trains on a part of the batch, or not at all.
Fix: Call zero_grad right after step, or right before the first micro-step, and nowhere else.
Detected: ddpcheck records zero_grad, backward passes and optimizer steps in order. It reports gradients that are
    repeatedly zeroed before a step has used them.
Ignore: If a step is skipped on purpose, and its gradients with it.
Example:
    for part in parts:
        optimizer.zero_grad()                # right: once, before the loop
        loss(ddp, part).backward()
"""
