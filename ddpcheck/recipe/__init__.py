"""The user's input: a recipe, where it is found, and the pytrees of tensors that its batches are."""
