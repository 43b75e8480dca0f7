"""DDP503 changed-after-wrapping: error, stops_ddp, spreads

A parameter was added, replaced, removed, frozen, unfrozen, cast or moved after wrapping.

Why: DDP has put its hooks on the tensors that it found when it was constructed. Tensors that replace them have no
    hooks. (`.double().float()` and `.cpu().cuda()` replace tensors, pytorch issue 104336.) DDP waits for frozen
    parameters, and never reduces unfrozen and added ones. A forward pass that ties, replaces or deletes layers also
    comes too late. (PyTorch docs, DistributedDataParallel: do not change parameters after wrapping.)
Fix: Finish the module first, wrap it last; wrap again after any such change.
Detected: ddpcheck compares the module's parameters with those at the construction of the wrapper. It compares
    identity, dtype, device and requires_grad.
Ignore: If a parameter is frozen after wrapping and find_unused_parameters=True is set.
Explains: DDP208 if same subjects; DDP101 DDP102 DDP103 DDP106 DDP301 DDP302 DDP303 DDP304 DDP305 DDP312 DDP306;
    DDP516 if only the loss
Reports: pytorch/pytorch#104336 Lightning-AI/pytorch-lightning#17937
Example:
    ddp = DistributedDataParallel(model)
    model.head = nn.Linear(8, 3)             # right: replace the head first, then wrap
"""
