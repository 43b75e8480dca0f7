"""Record the replica of a rank, and other models and tables in the program."""
