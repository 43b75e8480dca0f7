"""Optimizers: steps, schedules, clips, restored states."""
