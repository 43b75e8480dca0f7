"""User input: recipes, TARGET strings, and nested batches of tensors."""
