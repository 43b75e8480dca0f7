"""Judges: pure functions from evidence to findings, which never import torch.

Judges import only `findings` and `stream`. docs/rules-in-code.md lists the facts of each judge and their recorders.
"""
