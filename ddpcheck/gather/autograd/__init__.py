"""What the autograd graph tells: who is reached, where paths end and gradients become zero, which terms a loss has."""
