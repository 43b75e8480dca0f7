"""The logic of the pytest plugin: sends the code of a test to ranks, and reports its results."""
