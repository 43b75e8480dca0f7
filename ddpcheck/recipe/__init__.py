"""What the user hands in: a recipe, where it is found, and the nests of tensors that its batches are."""
