"""Logs of a watched run, written by the ranks and read afterwards.

Logs contain no pickles, and reading executes none of their contents. These modules are light: they never import torch.
"""
