"""DDP308 nondeterministic: warning

The same run twice, from the same state and seed, differs by more than rounding.

Why: If two equal runs differ, a difference between DDP and a reference proves nothing. So ddpcheck withholds verdicts
    that depend on such a difference. The usual sources are random numbers from an unseeded generator, state kept
    between calls, and data that changes from one read to the next. (PyTorch docs, 'Reproducibility'.)
Fix: Make model, batch and loss depend only on their arguments and the seed: use torch's default generator, no state
    kept between calls, no time or process id; then check again.
Detected: ddpcheck runs one step twice on a rank, from the same state and with the same seed. DDP308 is reported if
    the gradients differ by more than rounding.
Ignore: If the randomness is intended and cannot be seeded. ddpcheck still withholds the verdicts that need equal
    runs.
Example:
    def batch(step):
        generator = numpy.random.default_rng()             # right: numpy.random.default_rng(step)
        return torch.from_numpy(generator.normal(size=(8, 4)))
"""
