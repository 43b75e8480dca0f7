"""DDP106 unregistered-parameter: error

A leaf tensor receives a gradient, but is not a parameter of the wrapped module.

Why: DDP knows only the parameters that module.parameters() returned when DDP was constructed. It misses parameters in
    a Python list or dict, raw tensors with requires_grad, and parameters that are added after wrapping. DDP neither
    broadcasts nor averages these, and every rank silently trains its own copy. (PyTorch docs,
    DistributedDataParallel: all parameters must be registered before wrapping, and none added or removed later.)
Fix: Register it before wrapping: nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter.
Detected: ddpcheck compares the leaf tensors that receive a gradient in backward with the parameters of the wrapped
    module. A leaf tensor that is not a parameter is reported.
Ignore: If you average the gradient yourself, or if the tensor is an input and its gradient is only inspected.
Explains: DDP301 DDP302 DDP303 DDP306 DDP515 if same subjects; quietly DDP516 if only the loss; DDP301 DDP302 DDP303
    DDP305 DDP306 if made in forward; quietly DDP304 DDP312 if made in forward
Example:
    self.heads = [nn.Linear(8, 2) for _ in range(3)]           # a plain list hides them from DDP
    # right: self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
"""
