"""Parameters in the steps of a wrapper: probed, and their history."""
