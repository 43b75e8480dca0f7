"""DDP504 stale-optimizer: error

The optimizer holds tensors that are no longer the module's parameters, or lacks some that are.

Why: An optimizer built before the module was cast, moved or extended updates stale tensors. The model then does not
    change. (PyTorch docs, torch.optim: construct optimizers after moving the model.)
Fix: Give the optimizer all parameters, once the module has its final ones, device and dtype; freeze the others first.
Detected: ddpcheck compares the tensors of the optimizer with the parameters of the modules. A parameter with
    gradients is reported if no optimizer holds it and it does not change. Also reported: parameters that a custom
    optimizer (not from torch.optim) holds but never changes, while it does change others.
Ignore: If code other than an optimizer updates the parameters.
Example:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head = nn.Linear(8, 3)             # right: replace the head first, then make the optimizer
"""
