"""The source and the variables of a program, where the line or a name is asked for."""
