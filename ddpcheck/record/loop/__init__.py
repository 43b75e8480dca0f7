"""The loop around a wrapper: passes, reductions, optimizer steps, gradients that go past it."""
