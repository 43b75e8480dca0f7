"""DDP111 ignored-parameter: error

A parameter is trained, but the wrapper is configured to ignore it.

Why: _set_params_and_buffers_to_ignore_for_model sets a list of names. DDP neither broadcasts nor reduces the
    parameters with these names. Each rank steps with its own gradient, and the copies silently diverge.
Fix: Remove its name from the list, freeze it with requires_grad_(False), or reduce its gradient yourself.
Detected: ddpcheck reads the list of ignored names from the module. A parameter in this list is reported if its
    gradient differs between ranks. Parameters that belong to one rank only, such as experts of a mixture, are not
    reported. ddpcheck recognises them: they reach the loss only through an all_to_all that autograd differentiates.
Ignore: If you average its gradient yourself, or if each rank should train its own copy.
Explains: DDP208 DDP301 DDP306
Example:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
    DistributedDataParallel(model)           # right: leave out names of parameters that train
"""
