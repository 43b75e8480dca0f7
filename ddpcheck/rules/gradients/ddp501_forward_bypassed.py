"""DDP501 forward-bypassed: error

Gradients are computed by a forward pass that bypasses the wrapper.

Why: DDP prepares its reducer in its own forward. ddp.module(x), a parameter used outside forward, functional_call on
    the inner module and torch.autograd.grad all bypass the reducer. Nothing is reduced, and nothing is raised.
    (PyTorch docs, DistributedDataParallel: torch.autograd.grad does not work with it; call the wrapped module.)
Fix: Call the wrapper, not the module in it; move code that uses parameters into the module's forward.
Detected: DDP501 is reported if the loss depends on parameters of the wrapped module, but the wrapper was not called
    for this loss. `ddpcheck run` also reports parameters that an optimizer trains and no wrapper holds.
Ignore: If the gradients are averaged in another way, or if each rank should train these parameters separately.
Explains: DDP208 DDP306 DDP515
Reports: jingyaogong/minimind#853 intel/e2eAIOK#198 kohya-ss/sd-scripts#989
Example:
    output = ddp.module(x)                   # right: output = ddp(x)
    output.sum().backward()
"""
