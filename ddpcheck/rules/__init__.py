"""Rules by subject; a rule's file holds its documentation (docstring) and its judges."""
