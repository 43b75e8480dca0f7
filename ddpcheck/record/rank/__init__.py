"""Entry points and recorders for one rank of an unmodified script."""
