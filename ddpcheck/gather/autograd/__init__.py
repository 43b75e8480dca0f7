"""Evidence in the autograd graph: who is reached, where paths end and gradients become zero, the terms of a loss."""
