"""DDP306 state-diverged: error, spreads

Parameters, buffers or optimizer state differ between ranks after a step.

Why: Nothing makes the ranks equal again: DDP never broadcasts parameters after construction. From this step on, DDP
    averages the gradients of different models. A checkpoint keeps only rank 0's state. (PyTorch docs,
    DistributedDataParallel: parameters are never broadcast between processes.)
Fix: Make each step of the optimizer the same on every rank: draw its random numbers under one seed, give it the same
    state and options, and have a closure (LBFGS) return a loss that was reduced over the ranks.
Detected: After the optimizer's step, the ranks compare parameters and optimizer state, bit by bit. `ddpcheck run`
    also compares copies of the wrapped module outside the wrapper, such as an EMA. It also compares models that the
    training loop calls and does not change, such as a frozen teacher.
Ignore: If ranks diverge on purpose between averages, as in local SGD. In this case, compare the ranks right after an
    average.
Explains: DDP516 if only the loss
Example:
    if loss.item() < threshold:              # decided from local data: some ranks step, others do not
        optimizer.step()                     # right: all_reduce the decision first
"""
