"""DDP312 unexplained-difference: error

Gradients differ from the single process, and no pattern that ddpcheck knows explains it.

Why: The same model on the same samples has different gradients under DDP and in one process. No constant factor, no
    weight of samples and no coupling of samples explains the difference. So nothing says that the difference is
    harmless. (PyTorch docs, DistributedDataParallel: gradients are averaged over processes.)
Fix: Return the terms of the loss as a dict, and check again. Or compute each term twice: on a batch, and as the mean
    over its two halves. If the results differ, the term does not treat samples separately.
Detected: The gradients differ from those of a single process on the global batch by more than the measured rounding.
    No explanation of DDP303 to DDP310, DDP514 and DDP516 fits. The size of a difference is relative to the norm of
    the parameter's gradient on the global batch.
Ignore: If you have explained the difference yourself. If you have not, report it: the pattern may deserve a rule.
Example:
    smoothing = 0.1 if dist.is_initialized() else 0.0   # right: the same loss with and without a process group
    loss = cross_entropy(model(x), labels, label_smoothing=smoothing)
"""
