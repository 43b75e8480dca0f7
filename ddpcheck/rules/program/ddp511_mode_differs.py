"""DDP511 mode-differs: error

In a step, the model is in train mode on one rank and in eval mode on another.

Why: Dropout and BatchNorm then compute different functions, and BatchNorm statistics change on some ranks only. DDP
    silently averages the gradients.
Fix: Call train() and eval() on every rank at the same places; evaluate on all ranks, or call train() again after it.
Detected: No check reports this code today. A mode that differs between ranks is reported as DDP222.
Ignore: See DDP222.
Checks: repro layouts
Example:
    if rank == 0:
        model.eval()                         # right: on every rank, and back to model.train() after it
"""
