"""What the processes of a watched run have seen, in order: written by ranks, and read when the run has ended.

Nothing here is pickled, and nothing that is read is run. These modules are light: they never import torch.
"""
