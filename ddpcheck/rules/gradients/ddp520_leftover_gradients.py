"""DDP520 leftover-gradients: error

A step uses gradients that existed before its own backward passes, and were never zeroed.

Why: backward adds to .grad. Without zero_grad, each step uses the gradients of all steps before. In a GAN, two
    networks are trained in turn. The loss of one network leaves gradients in the other. The optimizer of the other
    network then uses these gradients together with its own. DDP averages all of them, so the ranks agree. (PyTorch
    docs, torch.optim.Optimizer.zero_grad.)
Fix: Call zero_grad of an optimizer right before the backward pass of its loss, or right after its step.
Detected: `ddpcheck run` inspects one gradient of each optimizer between a step and the next backward pass. DDP520 is
    reported if this gradient is still not zero, in three steps in a row, and backward adds to it.
Ignore: If gradients of several losses should be added up over several steps.
Example:
    loss_of_generator.backward()             # reaches the discriminator too
    generator_optimizer.step()
    loss_of_discriminator.backward()         # right: discriminator_optimizer.zero_grad() first
    discriminator_optimizer.step()
"""
