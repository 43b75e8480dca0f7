"""The logic of the pytest plugin: sends the code of a test to ranks, and reports its results.

Nothing here imports torch at its top but `assertions.on_rank`, which runs on ranks.
"""
