"""DDP216 unregistered-state: warning, takes_severity

A tensor that is a plain attribute of a module, neither parameter nor buffer, differs between ranks.

Why: DDP synchronises only parameters and buffers. If each rank builds another tensor from its own random numbers or
    data, the values stay different. The tensor is also missing from the state dict.
Fix: Build it in __init__ from the same seed on every rank, or register it with register_buffer before wrapping. If it
    changes during training, make the same change on every rank: all_reduce the values that it is computed from.
Detected: Before the first step and after each step, the ranks compare the tensors that modules hold as plain
    attributes. A tensor is reported if it differs between ranks. A tensor that the first step makes is reported only
    if the gradients also differ from those of the global batch.
Ignore: If the tensor is a cache of the rank's own samples, or differs on purpose.
Explains: DDP303 DDP304 DDP312; DDP516 if only the loss
Example:
    self.projection = torch.randn(8, 8)      # right: self.register_buffer("projection", torch.randn(8, 8))
"""
