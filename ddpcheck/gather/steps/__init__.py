"""A training step of a recipe, how far gradients are from each other, and whether samples are coupled."""
