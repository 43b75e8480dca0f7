"""Training step of a recipe, distances between gradients, and coupling of samples."""
