"""Optimizers: options, state, schedules and metrics that decide."""
