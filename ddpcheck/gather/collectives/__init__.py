"""Collectives: log of user calls, simulated answers, ddpcheck's own exchanges and averages."""
