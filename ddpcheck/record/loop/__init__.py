"""Record the loop around a wrapper: passes, reductions, steps, and bypassed gradients."""
