"""DDP107 zero-gradient-parameter: warning

Backward reaches a parameter, and its gradient is exactly zero in every step.

Why: DDP sees no fault: the gradient arrives and is reduced. But the parameter does not learn. Causes are a factor of
    zero, a branch of torch.where that is never selected, or a ReLU unit that is always off. A comparison with a
    single process shows nothing, because the gradient is zero there too.
Fix: Find the factor that is zero (a mask, a weight, a dead ReLU, a clamp, a rounding) and remove it. If the zero is
    intended, ignore DDP107.
Detected: The gradient is exactly zero on every rank in every step. ddpcheck then changes the parameters slightly and
    runs the step again. The parameter is reported only if its gradient is still zero. The finding names the operation
    in which the gradient becomes zero.
Ignore: If the zero is intended, for example 0.0 * output.sum() to satisfy DDP. Or if terms cancel rightly: a bias has
    no effect on the difference of two means.
Example:
    loss = mse(main, y) + 0.0 * auxiliary.sum()                # right, if it should learn: a weight that is not zero
"""
