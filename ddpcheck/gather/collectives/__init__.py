"""Collectives: the log of the user's calls, answers for a rank that is alone, and our own exchanges and averages."""
