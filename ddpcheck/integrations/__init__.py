"""Integrations with training frameworks, one optional module for each framework."""
