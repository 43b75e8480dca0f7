"""What stands behind the pytest plugin: a test's code on its way to the ranks, and what comes back of it."""
