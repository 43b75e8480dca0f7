"""DDP109 needless-find-unused: note

find_unused_parameters=True is set, and every parameter contributed in every step.

Why: DDP then walks the autograd graph after every forward pass and all-reduces a bitmap of used parameters. Both
    waste time in every step. (PyTorch docs, DistributedDataParallel, find_unused_parameters; DDP itself warns about
    it once.)
Fix: Remove find_unused_parameters=True; ddpcheck reports when it is needed again.
Detected: find_unused_parameters=True is set, and backward reached every parameter in every step on every rank.
Ignore: If a later phase of training leaves parameters out. ddpcheck has not checked the steps of that phase.
Reports: speechbrain/speechbrain#701
Example:
    DistributedDataParallel(model, find_unused_parameters=True)   # right here: DistributedDataParallel(model)
"""
