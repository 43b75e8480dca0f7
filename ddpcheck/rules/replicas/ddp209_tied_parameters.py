"""DDP209 tied-parameters: error

Parameters are one tensor under several names on one rank, and separate tensors on another.

Why: DDP counts a tied parameter once. If only some ranks tie, the lists of parameters have different lengths or pair
    up the wrong tensors (see DDP201 and DDP202).
Fix: Tie on every rank, before wrapping, and tie again after anything that replaces parameters (casting, loading).
Detected: Before DDP's first collective, the ranks compare which names share one tensor.
Ignore: Never.
Explains: DDP516 if only the loss
Example:
    if os.path.exists(checkpoint):           # true on one machine only
        model.head.weight = model.embedding.weight   # right: on every rank
"""
