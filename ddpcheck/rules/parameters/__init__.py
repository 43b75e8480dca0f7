"""Use of parameters in forward and loss."""
