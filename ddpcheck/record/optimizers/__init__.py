"""Recorders of optimizers: steps, schedules, gradient clipping, restored states."""
