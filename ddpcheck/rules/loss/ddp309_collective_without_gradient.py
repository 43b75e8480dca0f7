"""DDP309 collective-without-gradient: error

A collective that autograd does not differentiate is on the path from parameters to the loss.

Why: torch.distributed.all_reduce and all_gather are not differentiable. For backward, values from other ranks are
    constants. So the gradient lacks the contribution of these values, or stops at the collective. (PyTorch docs,
    torch.distributed: autograd through collectives is in torch.distributed.nn.functional.)
Fix: Use torch.distributed.nn.functional.all_reduce or all_gather, which autograd differentiates; if a value is only
    logged, reduce a detached copy of it.
Detected: ddpcheck records the collectives of the forward pass. DDP309 is reported if autograd does not differentiate
    a collective between parameters and the loss. The gradient must also differ from the global batch's. `ddpcheck
    run` reports a loss that was all-reduced in place and then differentiated. It also reports a loss that uses all
    gathered rows, including the rank's own, as constants. It is only a warning if the rank's own rows are replaced by
    features with a gradient. Then only the gradient from the other ranks' losses is lost, or, if every rank computes
    the same loss, the gradient is too small by a factor of the world size.
Ignore: If the values from other ranks should be constants, as negatives of a contrastive loss often are.
Explains: DDP303; DDP101 DDP102 if same subjects
Reports: mlfoundations/open_clip#616 KevinMusgrave/pytorch-metric-learning#10
Example:
    dist.all_gather(parts, features)         # parts carry no gradient
    everything = torch.cat(parts)            # right: torch.cat(torch.distributed.nn.functional.all_gather(features))
"""
