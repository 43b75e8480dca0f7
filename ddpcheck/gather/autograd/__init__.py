"""Evidence from the autograd graph: reached parameters, cut paths, and loss terms."""
