"""Rules by subject: one file per rule, whose docstring is its documentation, with its judges."""
