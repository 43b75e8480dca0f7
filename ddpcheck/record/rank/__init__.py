"""A rank of an unmodified script: how it is entered, and what watches it."""
