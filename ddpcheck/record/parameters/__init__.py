"""Probe and track the parameters in the steps of a wrapper."""
