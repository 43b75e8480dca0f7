"""Look up lines and names in the source and the variables of a program."""
