"""Parameters and the loss: unused, detached, conditional, zero."""
